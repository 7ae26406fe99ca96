"""Sums by axis, kind, phase, scope, source and layer: they add up, and never hide the unknown."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxpar.audit import audit
from jaxpar.audit.grouping import (
    GROUPINGS,
    NO_LAYER,
    Bounds,
    add_up,
    divided,
    exposure,
    grouped,
    layer_of,
    whole,
)
from jaxpar.errors import AuditError
from tests.audit.records import audit_of, collective

HLO = Path(__file__).parent / "hlo"


def keys(result, by):
    return [group.key for group in grouped(result, by)]


@pytest.mark.parametrize("by", GROUPINGS)
@pytest.mark.parametrize("name", ["tp.gpu_1x1x8", "fsdp.tpu_v5e_2x4", "pp.cpu"])
def test_groups_of_a_real_program_add_up_to_all_of_it(name, by):
    result = audit(HLO / f"{name}.txt.gz")
    groups = grouped(result, by)
    for key in ("payload_bytes", "wire_bytes"):
        sums = [getattr(group, key) for group in groups]
        totals = [getattr(total, key) for total in result.totals]
        known = None not in totals
        assert all(each.exact is not None for each in sums) == known
        if known:
            assert sum(each.low for each in sums) == sum(totals) > 0
            assert sum(group.wire_share for group in groups) == pytest.approx(1)
    json.dumps([group.to_json() for group in groups])


def test_largest_first_and_by_the_words_of_the_tables():
    result = audit_of(
        collective(axis="data", scope="", source=None, count=1),
        collective("all-gather", axis="data,tensor", count=100),
        collective(axis=None),
    )
    assert keys(result, "axis") == ["data,tensor", "half of tensor, stride 2", "data"]
    assert keys(result, "kind") == ["all-gather", "all-reduce"]
    assert keys(result, "scope") == ["layers/attention", "no scope"]
    assert keys(result, "source") == ["model.py:42", "unknown source"]
    gather, reduce = grouped(result, "kind")
    assert (gather.num_operations, gather.count.exact) == (1, 100)
    assert (gather.payload_bytes.exact, gather.wire_bytes.exact) == (102_400, 76_800)
    assert (reduce.num_operations, reduce.count.exact) == (2, 5)
    assert gather.wire_share == pytest.approx(76_800 / (76_800 + 1024 + 4 * 1536))


def test_an_unknown_count_makes_lower_bounds_and_no_share():
    result = audit_of(
        collective(count=(1, None)), collective(count=2), collective("all-gather", count=(0, 3))
    )
    reduce, gather = grouped(result, "kind")
    assert reduce.count == Bounds(low=3, high=None)
    assert reduce.wire_bytes == Bounds(low=3 * 1536, high=None)
    assert gather.payload_bytes == Bounds(low=0, high=3 * 1024)
    assert reduce.wire_share is None and gather.wire_share is None
    assert reduce.to_json()["wire_bytes"] is None
    assert reduce.to_json()["wire_bytes_min"] == 3 * 1536
    assert gather.to_json()["count_max"] == 3


def test_what_was_merged_from_two_phases_counts_in_both_and_its_bytes_in_one():
    merged = collective(
        axis="data", buffers=[("f32", 4, "forward"), ("f32", 996, "backward")], count=1
    )
    backward, forward = grouped(audit_of(merged), "phase")
    assert (backward.key, forward.key) == ("backward", "forward")
    assert (backward.payload_bytes.exact, forward.payload_bytes.exact) == (996, 4)
    assert backward.num_operations == forward.num_operations == 1


@given(
    sizes=st.lists(st.integers(0, 10**12), min_size=1, max_size=8),
    payload=st.integers(0, 10**13),
)
def test_the_portions_of_a_collective_are_all_of_it(sizes, payload):
    phases = ("forward", "backward", "recompute")
    found = collective(
        buffers=[("f32", size, phases[i % 3]) for i, size in enumerate(sizes)],
        payload_bytes=payload,
    )
    portions = divided(found, lambda buffer: buffer.phase).values()
    assert sum(portion.payload_bytes for portion in portions) == payload
    assert sum(portion.wire_bytes for portion in portions) == found.wire_bytes


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("layers_3/attention", "layers_3"),
        ("layer_3", "layer_3"),
        ("block3/mlp", "block3"),
        ("h.3", "h.3"),
        ("model/layers[12]/mlp", "model/layers[12]"),
        ("transformer/h/3/attn", "transformer/h/3"),
        ("Decoder/DecoderLayer_3/Dense_0", "Decoder/DecoderLayer_3"),
        ("encoder/layers_3/block_1", "encoder/layers_3"),
        ("layers/attention", "layers (scan)"),
        ("decoder/blocks", "decoder/blocks (scan)"),
        ("layers_0/a + layers_1/b", "layers_0 + layers_1"),
        ("layers_0/a + layers_0/b", "layers_0"),
        (" + ".join(f"layers_{i}" for i in range(5)), "5 layers merged"),
        ("embed + layers_0", "no layer + layers_0"),
        ("", NO_LAYER),
        ("layer_norm_0/scale", NO_LAYER),
        ("attention/h", NO_LAYER),
        ("Dense_0", NO_LAYER),
    ],
)
def test_the_layer_of_a_scope(scope, layer):
    assert layer_of(scope) == layer


def test_layers_come_in_their_order():
    scopes = ["layers_10/a", "layers_2/a", "layers_1/a", "head", "layers_" + "9" * 5000]
    result = audit_of(*(collective(scope=scope) for scope in scopes))
    assert keys(result, "layer")[:4] == [
        "layers_1",
        "layers_2",
        "layers_10",
        "layers_" + "9" * 5000,
    ]
    assert keys(result, "layer")[4] == NO_LAYER


def test_exposure_is_weighed_by_bytes_and_says_what_it_does_not_know():
    hidden = collective(axis="data", is_async=True, exposed_fraction=0.0, payload_bytes=3072)
    shown = collective(axis="data", exposed_fraction=1.0, payload_bytes=1024)
    unknown = collective(axis="data", is_async=True, exposed_fraction=None, payload_bytes=4096)
    assert exposure([whole(hidden), whole(shown)]) == (0.25, 0.25)
    assert exposure([whole(hidden), whole(shown), whole(unknown)]) == (0.125, 0.625)
    assert exposure([whole(collective(count=(0, 1)))]) is None
    assert exposure([]) is None
    group, other = grouped(audit_of(hidden, shown, collective(exposed_fraction=None)), "axis")
    assert (group.exposed_fraction, other.exposed_fraction) == (0.25, None)


def test_nothing_adds_up_to_nothing():
    assert grouped(audit_of(), "axis") == ()
    assert add_up([]).wire_bytes.exact == 0
    assert Bounds(low=0, high=None).times(0).exact == 0


def test_an_unknown_grouping_is_told_with_the_known_ones():
    with pytest.raises(AuditError, match="group by='axes' .* must be one of: 'axis', 'kind'"):
        grouped(audit_of(), "axes")
