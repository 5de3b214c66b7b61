"""Plans made by rule, for comparison: the paper's own and Megatron's, costed by the same model as ours."""
