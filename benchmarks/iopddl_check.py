"""Recheck an assignment in exact integers, with no code of the solver: python benchmarks/iopddl_check.py FILE ASSIGNMENT.json.

ASSIGNMENT.json has the list of strategies, or the last line that benchmarks/iopddl.py prints for the file.
"""

import gzip
import json
import sys
from itertools import accumulate
from pathlib import Path

raw = Path(sys.argv[1]).read_bytes()
problem = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["problem"]
answer = json.loads(Path(sys.argv[2]).read_text().strip().splitlines()[-1])
choices = answer if isinstance(answer, list) else answer["assignment"]
nodes, edges, limit = problem["nodes"], problem["edges"], problem["usage_limit"]
assert len(choices) == len(nodes["costs"]), f"{len(choices)} choices for {len(nodes['costs'])} nodes"
assert all(0 <= s < len(row) for s, row in zip(choices, nodes["costs"], strict=True)), "a strategy that does not exist"
cost = sum(row[s] for s, row in zip(choices, nodes["costs"], strict=True))
for (u, v), table in zip(edges["nodes"], edges["costs"], strict=True):
    cost += table[choices[u] * len(nodes["costs"][v]) + choices[v]]
change = [0] * (max((end for _, end in nodes["intervals"]), default=0) + 1)
for s, (begin, end), usage in zip(choices, nodes["intervals"], nodes["usages"], strict=True):
    if end > begin:
        change[begin] += usage[s]
        change[end] -= usage[s]
peak = max(accumulate(change))
print(f"cost {cost}, peak {peak} of {limit}: {'fits' if peak <= limit else 'DOES NOT FIT'}")
sys.exit(peak > limit or (isinstance(answer, dict) and answer["cost"] != cost))
