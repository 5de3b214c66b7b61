"""Flat programs -> when every instruction starts and stops: the inner loop of the simulation, as compiled code.

A program is parts (what comes first, a forward, a backward, what comes last) and the order in which they are run, once a microbatch; its
instructions are never written out. Programs of large models are millions of instructions, and several plans are compared.
"""

import enum
from typing import NamedTuple

import numpy as np

from alpa_hpc.kernels import Floats, Ints, Real, inner, kernel


class Op(enum.IntEnum):
    """What an instruction is to the clock."""

    RUN = 0
    SEND = 1
    RECV = 2
    JOIN = 3
    HOLD = 4
    """takes no time: bytes come or go"""


RUN, SEND, RECV, JOIN = int(Op.RUN), int(Op.SEND), int(Op.RECV), int(Op.JOIN)


class FlatPrograms(NamedTuple):
    """The programs of all meshes.

    Instruction i: `ops[i]`, its seconds, the bytes that it adds to what its mesh holds, the bytes that it needs beside them, its link (of
    a Send) and its tag in microbatch 0 (of Send and Recv). Part p (none is empty): instructions part_starts[p] to part_starts[p + 1]. Mesh
    m runs the parts `step_parts[s]` for microbatches `step_microbatches[s]`, s from step_starts[m] to step_starts[m + 1]; the n-th
    instruction that it runs has place first_places[m] + n in what comes out.
    """

    ops: Ints
    seconds: Floats
    adds: Ints
    workspace: Ints
    links: Ints
    tags: Ints
    part_starts: Ints
    step_parts: Ints
    step_microbatches: Ints
    step_starts: Ints
    first_places: Ints
    tag_stride: int
    num_tags: int
    num_links: int


class Clocks(NamedTuple):
    """Where each mesh is, and what it has done: the step, the instruction in it, the place in what comes out; time, bytes, busy seconds."""

    steps: Ints
    positions: Ints
    places: Ints
    times: Floats
    held: Ints
    peaks: Ints
    busy: Floats


class Spans(NamedTuple):
    """What comes out, a row an instruction, mesh after mesh."""

    starts: Floats
    stops: Floats
    held: Ints


@inner
def finish(programs: FlatPrograms, clocks: Clocks, spans: Spans, mesh: int, i: int, start: Real, stop: Real) -> None:
    """Note what the instruction i of a mesh has done, and go on to the next."""
    place = clocks.places[mesh]
    clocks.held[mesh] += programs.adds[i]
    clocks.peaks[mesh] = max(clocks.peaks[mesh], clocks.held[mesh] + programs.workspace[i])
    spans.starts[place], spans.stops[place], spans.held[place] = start, stop, clocks.held[mesh]
    clocks.places[mesh] += 1
    clocks.positions[mesh] += 1
    part = programs.step_parts[clocks.steps[mesh]]
    if programs.part_starts[part] + clocks.positions[mesh] == programs.part_starts[part + 1]:
        clocks.steps[mesh] += 1
        clocks.positions[mesh] = 0


@inner
def advance(programs: FlatPrograms, clocks: Clocks, spans: Spans, mesh: int, arrivals: Floats, links: Floats) -> bool:
    """Run a mesh up to a message that has not been sent or a join; whether it ran anything."""
    moved = False
    while clocks.steps[mesh] < programs.step_starts[mesh + 1]:
        step = clocks.steps[mesh]
        i = programs.part_starts[programs.step_parts[step]] + clocks.positions[mesh]
        tag = programs.tags[i] + programs.step_microbatches[step] * programs.tag_stride
        start = stop = clocks.times[mesh]
        op = programs.ops[i]
        if op == JOIN or (op == RECV and arrivals[tag] < 0):
            break
        if op == RUN:
            stop = start + programs.seconds[i]
            clocks.busy[mesh] += programs.seconds[i]
        elif op == SEND:
            start = max(start, links[programs.links[i]])
            stop = start + programs.seconds[i]
            links[programs.links[i]] = arrivals[tag] = stop
        elif op == RECV:
            stop = max(start, arrivals[tag])
        if op != SEND:
            clocks.times[mesh] = stop
        finish(programs, clocks, spans, mesh, i, start, stop)
        moved = True
    return moved


@inner
def joined(programs: FlatPrograms, clocks: Clocks, spans: Spans) -> bool:
    """Let all meshes join, if all have come to it."""
    num_meshes = len(clocks.times)
    for mesh in range(num_meshes):
        if clocks.steps[mesh] == programs.step_starts[mesh + 1]:
            return False
        i = programs.part_starts[programs.step_parts[clocks.steps[mesh]]] + clocks.positions[mesh]
        if programs.ops[i] != JOIN:
            return False
    start = clocks.times.max()
    for mesh in range(num_meshes):
        i = programs.part_starts[programs.step_parts[clocks.steps[mesh]]] + clocks.positions[mesh]
        came, clocks.times[mesh] = clocks.times[mesh], start + programs.seconds[i]
        finish(programs, clocks, spans, mesh, i, came, clocks.times[mesh])
    return True


@kernel
def run_clocks(programs: FlatPrograms, resident: Ints, num_places: int) -> tuple[Clocks, Spans]:
    """Run all programs as far as they go; `resident` = bytes that each mesh holds before. A mesh that is not at its end waits for ever."""
    num_meshes = len(resident)
    clocks = Clocks(
        programs.step_starts[:-1].copy(),
        np.zeros(num_meshes, np.int64),
        programs.first_places.copy(),
        np.zeros(num_meshes),
        resident.copy(),
        resident.copy(),
        np.zeros(num_meshes),
    )
    spans = Spans(np.zeros(num_places), np.zeros(num_places), np.zeros(num_places, np.int64))
    arrivals, links = np.full(programs.num_tags, -1.0), np.zeros(programs.num_links)
    moving = True
    while moving:
        moving = False
        for mesh in range(num_meshes):
            moving |= advance(programs, clocks, spans, mesh, arrivals, links)
        moving |= joined(programs, clocks, spans)
    return clocks, spans
