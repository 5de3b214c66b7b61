"""What a model must offer to be trained from a config: three methods on one object, all of plain single-device JAX.

A model of your own is a class anywhere on Python's path. Its config names it, and the other keys are the arguments of its constructor:

    # my_configs/model/mine.yaml, used by: python -m alpa_hpc --config-dir my_configs name=mine model=mine data=synthetic
    _target_: my_package.Mine
    width: 256

    @dataclass(frozen=True)
    class Mine:
        width: int

        def init(self, key):                  # a pytree of arrays; every one of them is trained
            return {"w": 0.02 * jax.random.normal(key, (self.width, 1))}

        def loss(self, params, batch, key):   # a float scalar: the mean over the rows of the batch
            return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

        def batch(self, batch_size):          # shapes and dtypes of a batch; the first dim of every leaf is batch_size
            widths = {"x": self.width, "y": 1}
            return {name: jax.ShapeDtypeStruct((batch_size, width), jnp.float32) for name, width in widths.items()}
"""

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax  # at run time the command line composes and prints configs without it


@runtime_checkable
class Model(Protocol):
    """The three methods. They know nothing of meshes, microbatches or stages: that is the plan's affair.

    What `loss` makes of several rows together, such as BatchNorm's statistics, is of the rows it is given: a microbatch, over all devices.

    A model may also have `iteration_flops(batch_size: int, remat: bool) -> float`, the FLOP of one iteration by the convention of its
    published figures; where it is there, TFLOPS are reported by it, else by counting the traced operators.
    """

    def init(self, key: "jax.Array") -> Any:
        """Fresh parameters, a pytree of arrays, from a PRNG key."""
        ...

    def loss(self, params: Any, batch: Any, key: "jax.Array") -> "jax.Array":
        """The mean loss of a batch, a float scalar; `key` is for dropout, and differs a step and a microbatch."""
        ...

    def batch(self, batch_size: int) -> Any:
        """The shapes and dtypes of a batch: a pytree of `jax.ShapeDtypeStruct` whose first dim is `batch_size`."""
        ...
