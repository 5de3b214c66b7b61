"""Recheck an assignment in exact integers, with no code of the solver: python benchmarks/iopddl_check.py FILE ASSIGNMENT.json.

ASSIGNMENT.json has the list of strategies, or the last line that benchmarks/iopddl.py prints for the file.
"""

import gzip
import json
import sys
from itertools import accumulate
from pathlib import Path

NOT_ALLOWED = 10**18
if len(sys.argv) != 3:
    sys.exit(__doc__)
raw = Path(sys.argv[1]).read_bytes()
problem = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)["problem"]
answer = json.loads((Path(sys.argv[2]).read_text().strip().splitlines() or ["null"])[-1])
told = answer if isinstance(answer, dict) else {"assignment": answer}
choices = json.loads(Path(told["assignment_path"]).read_text()) if "assignment_path" in told else told.get("assignment")
nodes, edges, limit = problem["nodes"], problem["edges"], problem["usage_limit"]
if not isinstance(choices, list) or len(choices) != len(nodes["costs"]):
    sys.exit(f"the assignment is no list of {len(nodes['costs'])} strategies")
if not all(type(s) is int and 0 <= s < len(row) for s, row in zip(choices, nodes["costs"], strict=True)):
    sys.exit("the assignment has a strategy that does not exist")
costs = [row[s] for s, row in zip(choices, nodes["costs"], strict=True)]
for (u, v), table in zip(edges["nodes"], edges["costs"], strict=True):
    costs.append(table[choices[u] * len(nodes["costs"][v]) + choices[v]])
change: dict[int, int] = {}
for s, (begin, end), usage in zip(choices, nodes["intervals"], nodes["usages"], strict=True):
    if end > begin:
        change[begin] = change.get(begin, 0) + usage[s]
        change[end] = change.get(end, 0) - usage[s]
cost, peak = sum(costs), max(accumulate(change[time] for time in sorted(change)), default=0)
faults = ["DOES NOT FIT"] * (peak > limit) + ["TAKES WHAT IS NOT ALLOWED"] * (max(costs) >= NOT_ALLOWED)
faults += [f"IS SAID TO COST {told['cost']}"] if told.get("cost", cost) != cost else []
print(f"cost {cost}, peak {peak} of {limit}: {', '.join(faults) or 'fits'}")
sys.exit(bool(faults))
