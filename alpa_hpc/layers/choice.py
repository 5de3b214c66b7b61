"""The block that a model repeats -> how many layers to cut it into, where nobody says (the paper leaves its L to the user).

Layers are whole blocks, as few a layer as give at most `MOST_LAYERS` layers: 48 blocks become 16 layers of 3, and a model one block deeper
keeps most of its layers. A model without blocks gets `MOST_LAYERS`, or a layer a matrix product where it has fewer. More layers would make
the search slower (it grows with their square) and seldom the plan faster: the paper's own points have 1 to 16.
"""

from alpa_hpc.layers.blocks import RepeatedBlock

CHOOSE = 0  # in place of a number of layers: choose it
MOST_LAYERS = 16


def choose_num_layers(block: RepeatedBlock, num_heavy: int) -> int:
    """The number of layers, by the rule above; `num_heavy` equations of the model are matrix products or convolutions."""
    if block.times > 1:
        blocks_a_layer = -(-block.times // MOST_LAYERS)
        return block.times // blocks_a_layer
    return max(1, min(MOST_LAYERS, num_heavy))
