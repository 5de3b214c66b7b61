"""(equation, plan, tiles) -> tiles, for primitives whose parameters hold shapes, or that must know where a tile lies."""
