"""LayeredStep + ClusterSpec -> ParallelPlan: the paper's Algorithm 1, pure; who measures is the caller's choice."""
