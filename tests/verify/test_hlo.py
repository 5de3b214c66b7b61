"""The parser reads collectives however XLA writes them: in the background or not, combined or not, groups in each of their forms."""

import pytest

from alpa_hpc.sharding.resharding import CollectiveKind
from alpa_hpc.verify.hlo import Collective, Groups, collectives

PAIRS: Groups = ((0, 4), (1, 5), (2, 6), (3, 7))
ROWS: Groups = ((0, 1, 2, 3), (4, 5, 6, 7))
ALL: Groups = (tuple(range(8)),)

HLO = """
HloModule jit_f, is_scheduled=true, replica_count=1, num_partitions=8
  %param = f32[4,8]{1,0} parameter(0)
  %all-reduce.1 = (f32[], f32[16]{0}) all-reduce(%a, %b), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  ROOT %rs = bf16[2,8]{1,0} reduce-scatter(%whole), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
  %ag = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%param), channel_id=3, replica_groups=[2,4]<=[8], dimensions={0}
  %done = f32[16,8]{1,0} all-gather-done(%ag), metadata={op_name="jit(f)/all_gather"}
  %cp = pred[3]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %a2a = (s32[2]{0}, s32[2]{0}) all-to-all(%x, %y), channel_id=4, replica_groups={}, dimensions={0}
  %rss = ((f32[32,8]{1,0}, f32[8]{0}), (f32[16,8]{1,0:T(8,128)}, /*index=1*/f32[4]{0})) reduce-scatter-start(%p, %q), channel_id=5, \
replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%add, metadata={op_name="jit(f)/shard_map/reduce_scatter" stack_frame_id=3}
  %cps = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%param), source_target_pairs={{0,1}}
  %ars = f32[8]{0} all-reduce-start(%param), channel_id=6, replica_groups=@mesh['x'=2,'y'=4] {'y'}, to_apply=%add
  %fusion = f32[4]{0} fusion(%all-reduce.1), kind=kLoop, calls=%fused_all-reduce
"""


def test_each_collective_counts_once_with_the_arrays_of_its_larger_side():
    assert collectives(HLO) == (
        Collective(CollectiveKind.ALL_REDUCE, (4, 64), PAIRS),
        Collective(CollectiveKind.REDUCE_SCATTER, (128,), ROWS),
        Collective(CollectiveKind.ALL_GATHER, (512,), ROWS),
        Collective(CollectiveKind.COLLECTIVE_PERMUTE, (3,), ((0, 1), (1, 0))),
        Collective(CollectiveKind.ALL_TO_ALL, (8, 8), ALL),
        Collective(CollectiveKind.REDUCE_SCATTER, (1024, 32), PAIRS, "jit(f)/shard_map/reduce_scatter"),
        Collective(CollectiveKind.COLLECTIVE_PERMUTE, (16,), ((0, 1),)),
        Collective(CollectiveKind.ALL_REDUCE, (32,), ROWS),
    )


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", PAIRS),
        ("[4,2]<=[2,4]T(1,0)", PAIRS),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", PAIRS),
        ("[2,4]<=[8]", ROWS),
        ("[2,4]<=[2,4]", ROWS),
        ("mesh['x'=2,'y'=4] {'y'}", ROWS),
        ("[1,8]<=[8]", ALL),
        ("mesh['x'=2,'y'=4] {'x','y'}", ALL),
        ("{}", ALL),
    ],
)
def test_groups_are_read_in_each_of_their_forms(written: str, groups: Groups):
    line = f"  %r = f32[2]{{0}} all-reduce(f32[2]{{0}} %x), channel_id=1, replica_groups={written}, to_apply=%add"
    text = f"HloModule f, num_partitions=8\n{line}"
    assert collectives(text) == (Collective(CollectiveKind.ALL_REDUCE, (8,), groups),)


def test_each_dtype_has_its_size():
    sizes = {"pred": 5, "s4": 5, "f8e4m3fn": 5, "bf16": 10, "c64": 40}
    for dtype, size in sizes.items():
        (one,) = collectives(f"  %r = {dtype}[5]{{0}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add")
        assert one.num_bytes == size, dtype
