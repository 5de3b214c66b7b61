"""Flags with which XLA compiles programs that run once in a fraction of the time: no optimising by LLVM, and no fusions emitted by MLIR.

What a program computes and exchanges stays the same. Tests that start the product as a person does take the flags out again.
"""

QUICK_FLAGS = " ".join(
    (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    )
)
