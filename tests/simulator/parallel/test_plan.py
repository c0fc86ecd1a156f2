"""Plans as text and as data; what is illegal names the nearest legal choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import ConfigurationError
from laconic.simulator.parallel.plan import Plan, nearest_divisor, parse_plan
from laconic.workload.transformer_presets import MODELS

_DEGREE = st.sampled_from((1, 2, 3, 4, 8))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that can be written down."""
    tp, pp = draw(_DEGREE), draw(_DEGREE)
    schedule = draw(st.sampled_from(("1f1b", "interleaved", "zero_bubble"))) if pp > 1 else "1f1b"
    return Plan(
        dp=draw(_DEGREE),
        tp=tp,
        pp=pp,
        cp=draw(st.sampled_from((1, 2))),
        ep=draw(st.sampled_from((1, tp))),
        zero=draw(st.integers(0, 3)),
        micro_batch=draw(st.integers(1, 9)),
        schedule=schedule,
        interleave=draw(st.integers(2, 6)) if schedule == "interleaved" else 1,
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        sequence_parallel=tp > 1 and draw(st.booleans()),
    )


@given(plans())
def test_what_is_printed_reads_back(plan: Plan) -> None:
    assert parse_plan(str(plan)) == plan


def test_the_words_of_the_page() -> None:
    text = (
        "dp=16 tp=8 pp=4 ep=1 cp=1 zero=3 micro_batch=1 schedule=interleaved(3) recompute=selective sequence_parallel"
    )
    plan = parse_plan(text)
    assert plan.gpus == 512
    assert (plan.schedule, plan.interleave, plan.recompute, plan.sequence_parallel) == (
        "interleaved",
        3,
        "selective",
        True,
    )
    assert parse_plan("") == Plan()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dp=16 tq=8", 'there is no setting "tq"'),
        ("dp=16 recompte=full", 'Did you mean "recompute"'),
        ("dp=many", 'dp must be a whole number, got "many"'),
        ("dp=-1", "dp must be a whole number"),
        ("dp=0", "dp must be at least 1, got 0"),
        ("dp=2 dp=4", "dp is given twice"),
        ("zero=4", "zero must be 0, 1, 2 or 3"),
        ("pp=2 schedule=1f2b", 'schedule cannot be "1f2b". Did you mean "1f1b"'),
        ("pp=2 schedule=interleaved", "schedule=interleaved(2)"),
        ("pp=2 schedule=zero_bubble(2)", "takes no number"),
        ("schedule=zero_bubble", "has no effect with pp=1"),
        ("sequence_parallel", "sequence_parallel has no effect with tp=1"),
        ("tp=2 sequence_parallel=maybe", "true or false"),
        ("recompute=some", 'recompute cannot be "some"'),
        ("dp=6 ep=4", "must divide dp x tp x cp = 6. The nearest that does is ep=3"),
    ],
)
def test_bad_words_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_plan(text)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "model", "gpus", "expected"),
    [
        ("dp=2 tp=8", "llama3-8b", 32, "= 16 does not equal the number of GPUs, 32. With dp=4 it does"),
        ("dp=2 tp=5", "llama3-8b", 32, "5 does not divide 32; the nearest number of GPUs that it divides is 30"),
        ("tp=3", "llama3-8b", 3, "32 heads are not divisible by tp=3. The nearest that divides them is tp=2"),
        ("pp=33", "llama3-8b", 33, "needs 33 layers, but llama3-8b has 32. The largest pp is 32"),
        ("pp=8 schedule=interleaved(5)", "llama3-8b", 8, "The largest pp is 6"),
        ("dp=4 ep=2", "llama3-8b", 4, "has no experts. Give ep=1"),
        ("dp=3 ep=3", "mixtral-8x7b", 3, "8 experts are not divisible by ep=3. The nearest that divides them is ep=2"),
        ("pp=2 schedule=interleaved(40)", "llama3-8b", 2, "With pp=2 there are at most 16 groups"),
        ("cp=3 tp=2 sequence_parallel", "llama3-8b", 6, "by cp=3 x tp=2. The nearest cp that divides them is 2"),
        ("cp=3", "llama3-8b", 3, "8192 tokens are not divisible by cp=3. The nearest cp that divides them is 2"),
    ],
)
def test_plans_that_do_not_fit_the_model_are_refused(text: str, model: str, gpus: int, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_plan(text).check(MODELS[model], gpus=gpus, sequence=8192)
    assert expected in str(caught.value)


def test_lengths_that_tensor_parallelism_does_not_divide_name_the_nearest_length() -> None:
    with pytest.raises(ConfigurationError, match=r"tp must divide them; the nearest length .* is 8200"):
        parse_plan("tp=8 sequence_parallel").check(MODELS["llama3-8b"], sequence=8197)


@pytest.mark.parametrize("number", [1, 2, 7, 12, 97, 360])
def test_the_nearest_divisor(number: int) -> None:
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    for wanted in range(1, 400):
        assert nearest_divisor(wanted, number) == min(divisors, key=lambda n: (abs(n - wanted), n))
    assert nearest_divisor(1 << 20, 2**89 - 1) == 1, "a large prime takes no loop over all of it"


@pytest.mark.parametrize("key", ["dp", "tp", "pp", "ep", "cp", "micro_batch"])
def test_absurd_degrees_are_refused_at_once(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"plan: {key} must be at most 1048576, got 999999999"):
        parse_plan(f"{key}=999999999")


def test_a_batch_that_cannot_be_divided_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"not divisible by dp x micro_batch = 6. The nearest .* has 12"):
        parse_plan("dp=3 micro_batch=2").num_micro_batches(13)
