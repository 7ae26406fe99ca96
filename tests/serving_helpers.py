"""What tests of several workers share: fleets, compiled once for the session."""

import functools

from jaxpar.serve.disaggregation import Disaggregated
from jaxpar.serve.replicas import Replicas
from tests.serve_helpers import DENSE, alone, plan, some_params


@functools.cache
def two_replicas():
    small = plan("tensor=2", num_slots=2, num_blocks=12)
    return Replicas(DENSE, small, some_params(DENSE), num_replicas=2)


@functools.cache
def one_and_two():
    """One prefill worker and two that decode. There are two key/value heads: on `tensor=4` two
    devices have each, on `tensor=2` one."""
    return Disaggregated(
        DENSE,
        some_params(DENSE),
        prefill=plan("tensor=4", num_slots=3, num_blocks=14),
        decode=plan("tensor=2", num_slots=2, num_blocks=8),
        num_decode=2,
    )


def answers_alone(given):
    """Of (step, request) pairs: what the reference says, where rounding decides nothing."""
    answers = [alone(DENSE)(request) for _, request in given]
    assert min(answer.margin for answer in answers) > 1e-4
    return [answer.tokens for answer in answers]
