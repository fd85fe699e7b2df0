#!/usr/bin/env python3
"""Generated round trips of files: torch is the oracle, hypothesis draws and reduces.

    round_trips.py TESSERA LAYOUTS COUNT SEED [FEATURE...]

draws COUNT cases in chunks of 200, chunk i with seed SEED + i, so that a chunk can be run again alone and a long run
can go on where it was stopped. Exit 1 when any failed; each kind of failure is reduced and printed as a script to run
in this folder. A FEATURE is one that `draws.KNOWN` leaves out.
"""
import contextlib
import logging
import sys
import time
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

import hypothesis.configuration  # noqa: E402
import hypothesis.errors  # noqa: E402
from hypothesis import HealthCheck, Phase, given, seed, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import checks  # noqa: E402
import draws  # noqa: E402

CHUNK = 200


@st.composite
def cases(draw, without):
    case = draw(st.one_of(draws.trees(without), draws.worlds(without), draws.trainings()))
    if "olmo" in case.more:
        return case
    steps = checks.WORLD_STEPS if "mesh" in case.more else checks.STEPS
    case.more["steps"] = draw(st.lists(st.sampled_from(sorted(steps)), min_size=1, max_size=3, unique=True))
    case.more["seed"] = draw(st.integers(0, 999))
    return case


def run_chunk(number, count, tools):
    failures = {}

    @seed(number)
    @settings(max_examples=count, database=None, derandomize=False, deadline=None, print_blob=False,
              suppress_health_check=list(HealthCheck), phases=[Phase.generate, Phase.shrink])
    @given(cases(tools.without))
    def run(case):
        try:
            tools.outcomes[checks.check(case, tools)] += 1
        except checks.Failure as failure:
            if type(failure) not in failures:
                print(f"reducing {str(failure)[:200]}", flush=True)
            # The last of a kind is the smallest: hypothesis ends with it.
            failures[type(failure)] = (case, failure)
            raise
        except Exception as error:
            failure = checks.failure(f"the check raises {type(error).__name__}", repr(error))
            failures[type(failure)] = (case, failure)
            raise failure from error

    with contextlib.suppress(checks.Failure, ExceptionGroup, hypothesis.errors.Flaky):
        run()
    return failures


def script(case, failure):
    return f"""
# {str(failure)[:1500]}
from checks import *; from draws import Case
check({case!r}, Tools(TESSERA, LAYOUTS))
"""


def main(command, layouts, count, first, *features):
    tools = checks.Tools(command, layouts)
    tools.without = draws.KNOWN - set(features)
    hypothesis.configuration.set_hypothesis_home_dir(tools.home)
    started = time.monotonic()
    known = {}
    try:
        for i in range((count + CHUNK - 1) // CHUNK):
            failures = run_chunk(first + i, min(CHUNK, count - i * CHUNK), tools)
            for kind, (case, failure) in failures.items():
                if kind not in known:
                    known[kind] = failure
                    print(f"seed {first + i}:{script(case, failure)}", flush=True)
            print(f"seed {first + i}: {tools.outcomes['checked']} checked, {len(known)} kinds of failures, "
                  f"{time.monotonic() - started:.0f} s", flush=True)
    finally:
        tools.close()
        for name, times in sorted(tools.outcomes.items()):
            print(f"{times:7} {name}")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3], *map(int, sys.argv[3:5]), *sys.argv[5:]))
