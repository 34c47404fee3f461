"""What the simulator has found in the product, each as the smallest run that showed it.

Runs are written out, not drawn: seeds mean something else as soon as the generator changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import undo

from pd_integration.sim.scenario import Client, Reset, Scenario


@dataclass(frozen=True)
class Finding:
    """name: what must hold. undo: takes the repair out. kind: how the run ends then."""

    name: str
    undo: Callable[[Any], None]
    kind: str
    scenario: Scenario


def prompt(index: int, shared: int, own: int) -> tuple[int, ...]:
    """So many tokens that all clients share, then so many of this one's own."""
    return (*range(3, 3 + shared), *range(100 + 8 * index, 100 + 8 * index + own))


SMALL = Scenario(
    seed=0,
    mode="sync",
    ranks=1,
    model="full",
    num_blocks=13,
    host_blocks=52,
    max_model_len=40,
    max_num_seqs=3,
    token_budget=6,
    prefix_caching=False,
    share_prefixes=False,
    priority=False,
    zeroing=False,
    num_drafts=0,
    lookahead=0,
    early_output=False,
    sibling="none",
    fail_stores=0.0,
    fail_loads=0.0,
    fail_remote=0.0,
    failure_policy="recompute",
    store_seconds=0.001,
    load_seconds=0.001,
    remote_seconds=0.01,
    clients=(),
    resets=(),
)
"""One rank with full attention and a small cache, where nothing fails; each run says what is different in it."""

FINDINGS = (
    Finding(
        "a failure within the step is known before its token goes out",
        undo.no_wait_for_loads,
        "wrong tokens",
        replace(
            SMALL,
            seed=2,
            fail_loads=0.5,
            failure_policy="fail",
            clients=(
                Client(index=0, step=0, prompt=tuple(range(7)), max_tokens=33, priority=1),
                Client(index=7, step=27, prompt=tuple(range(700, 707)), max_tokens=33),
            ),
        ),
    ),
    Finding(
        "a failed load into a sliding window is taken back whole",
        undo.any_single_group_loads_within_the_step,
        "wrong KV",
        replace(
            SMALL,
            seed=172,
            ranks=2,
            model="sliding",
            num_blocks=10,
            host_blocks=40,
            max_num_seqs=4,
            token_budget=4,
            sibling="after",
            fail_loads=0.5,
            remote_seconds=0.5,
            clients=(
                Client(index=0, step=0, prompt=tuple(range(13)), max_tokens=27, remote=True),
                Client(
                    index=38, step=46, prompt=tuple(range(3800, 3812)), max_tokens=1, priority=1, remote=True, stop_at=0
                ),
                Client(index=39, step=54, prompt=tuple(range(3900, 3905)), max_tokens=2, remote=True),
                Client(index=40, step=55, prompt=tuple(range(4000, 4013)), max_tokens=1, stop_at=0, abort="running"),
                Client(index=43, step=57, prompt=tuple(range(4300, 4317)), max_tokens=4, priority=2, remote=True),
                Client(index=44, step=59, prompt=tuple(range(4400, 4405)), max_tokens=35, priority=2, remote=True),
                Client(index=45, step=59, prompt=tuple(range(4500, 4508)), max_tokens=17, remote=True),
                Client(index=46, step=59, prompt=tuple(range(4600, 4604)), max_tokens=31, priority=1),
            ),
        ),
    ),
    Finding(
        "a failed load leaves nothing in the prefix cache",
        undo.loads_within_the_step_fill_the_prefix_cache,
        "wrong tokens",
        replace(
            SMALL,
            seed=179,
            max_num_seqs=2,
            token_budget=4,
            prefix_caching=True,
            fail_loads=0.5,
            clients=(
                Client(index=37, step=62, prompt=prompt(37, 24, 0), max_tokens=8),
                Client(index=38, step=62, prompt=prompt(38, 0, 5), max_tokens=7, priority=1),
                Client(index=39, step=62, prompt=prompt(39, 7, 0), max_tokens=20, priority=1),
                Client(index=40, step=62, prompt=prompt(40, 0, 4), max_tokens=32, abort="running"),
                Client(index=41, step=62, prompt=prompt(41, 10, 0), max_tokens=30, priority=2, abort="running"),
                Client(index=42, step=70, prompt=prompt(42, 24, 0), max_tokens=1, priority=2),
                Client(index=43, step=70, prompt=prompt(43, 2, 1), max_tokens=30),
                Client(index=44, step=78, prompt=prompt(44, 3, 4), max_tokens=1, priority=1),
                Client(index=45, step=80, prompt=prompt(45, 4, 0), max_tokens=23, priority=1),
                Client(index=46, step=82, prompt=prompt(46, 11, 0), max_tokens=1, priority=2),
                Client(index=47, step=83, prompt=prompt(47, 2, 3), max_tokens=2, stop_at=0, abort="running"),
                Client(index=48, step=83, prompt=prompt(48, 24, 1), max_tokens=9, priority=2),
                Client(index=49, step=83, prompt=prompt(49, 6, 1), max_tokens=21, priority=1),
                Client(index=50, step=83, prompt=prompt(50, 10, 0), max_tokens=30, priority=2),
            ),
        ),
    ),
    Finding(
        "no step builds on a failed load that is recomputed",
        undo.loads_within_overlapping_steps_are_recomputed,
        "wrong tokens",
        replace(
            SMALL,
            seed=2,
            mode="async",
            fail_loads=0.5,
            clients=(
                Client(index=0, step=0, prompt=tuple(range(30)), max_tokens=5, priority=1),
                Client(index=2, step=4, prompt=tuple(range(200, 213)), max_tokens=21, priority=1),
            ),
        ),
    ),
    Finding(
        "what was saved before a reset of running requests is dropped",
        undo.resets_keep_what_was_saved,
        "stale KV",
        replace(
            SMALL,
            seed=322,
            failure_policy="fail",
            clients=(
                Client(index=0, step=0, prompt=tuple(range(15)), max_tokens=25),
                Client(index=1, step=1, prompt=tuple(range(100, 107)), max_tokens=27, abort="preempted"),
            ),
            resets=(Reset(step=27, running=True, connector=False),),
        ),
    ),
    Finding(
        "two loaded requests do not hold each other up chunked",
        undo.standstills_are_not_resolved,
        "no progress",
        replace(
            SMALL,
            seed=455,
            model="full+chunked",
            num_blocks=16,
            host_blocks=16,
            token_budget=3,
            clients=(
                Client(index=69, step=88, prompt=tuple(range(6900, 6916)), max_tokens=23),
                Client(index=70, step=92, prompt=tuple(range(7000, 7005)), max_tokens=35),
                Client(index=71, step=92, prompt=tuple(range(7100, 7110)), max_tokens=30, priority=1),
                Client(index=72, step=92, prompt=tuple(range(7200, 7210)), max_tokens=30),
            ),
        ),
    ),
    Finding(
        "loaded requests do not hold each other up sliding",
        undo.standstills_are_not_resolved,
        "no progress",
        replace(
            SMALL,
            seed=311,
            model="full+sliding",
            num_blocks=19,
            host_blocks=19,
            max_num_seqs=5,
            token_budget=5,
            priority=True,
            clients=(
                Client(index=11, step=13, prompt=tuple(range(1100, 1120)), max_tokens=20, priority=1),
                Client(index=12, step=21, prompt=tuple(range(1200, 1209)), max_tokens=31, priority=2),
                Client(index=13, step=25, prompt=tuple(range(1300, 1310)), max_tokens=30),
            ),
            resets=(Reset(step=31, running=True, connector=False),),
        ),
    ),
)
