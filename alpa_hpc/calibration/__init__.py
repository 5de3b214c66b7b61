"""What a cluster's devices and links really do: primitives measured once on its ranks, and the cost model's constants fitted to them."""
