"""`laconic plan`: which strategy to use for a model on a cluster, what it gains, what it costs, and why.

With --json, one stable document:

    {"verdict": str,
     "workload": {"name", "num_parameters", "gradient_bytes", "compute_s", "batch", "source"},
     "cluster": str, "workers": int, "steps": int,
     "baseline": CHOICE, "best": CHOICE,
     "choices": [CHOICE],             in the order of time
     "crossovers": [{"from_bps", "to_bps": number or null, "strategy", "islands"}],
     "refused": [{"strategy", "reason"}],
     "hopeless": [str],               not simulated: too many steps, even if all communication were free
     "grounds": {"measured": [str], "assumed": [str], "not modelled": [str]}}

    CHOICE = {"name", "strategy", "islands": bool,             FSDP2 inside hosts, the strategy between them
              "standing": "ranked" | "limits" | "unknown", "reason",
              "step_s", "compute_s", "exposed_s", "wire_bytes", "seconds", "seconds_low", "seconds_high",
              "memory_bytes", "state_bytes",
              "loss": null or {"known", "gap", "gap_low", "gap_high", "steps_ratio", "steps_ratio_low",
                               "steps_ratio_high", "because"}}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from laconic.cli.explain import parse_count
from laconic.cli.files import check_writable, write_text
from laconic.cli.options.plan import Arguments
from laconic.cli.plan_parallel import run_parallel
from laconic.cli.plan_view import as_json, sections, watching
from laconic.cli.terminal import emit, emit_json, emit_sections, printable
from laconic.cluster import parse_bandwidth
from laconic.cluster.place import Place, Setting
from laconic.errors import UsageError
from laconic.planner import Answer, Limits, Question, answer
from laconic.planner.crossovers import BandwidthRange, Cell, cells, ranges
from laconic.planner.question import USUAL_STEPS, likely_steps
from laconic.units import human_rate, human_seconds, parse_quantity
from laconic.workload import DTYPES, IMAGE_WORKLOADS, WORKLOADS, Workload, workload
from laconic.workload.devices import KnownDevice, device
from laconic.workload.guessed import BATCH, SEQUENCE, decoder_workload, guessed_shape
from laconic.workload.hugging_face import is_config, read_config, sizes_not_used
from laconic.workload.profiler import profile
from laconic.workload.script import load_subject

_USUAL_DEVICE = "h200"
_MOST_PARAMS = 2 * 10**12
_MAP_HOSTS = 5
"""Numbers of hosts on the map."""


def run(arguments: Arguments) -> int:
    """Search, print, and draw."""
    if arguments.parallel or arguments.sites != 1 or arguments.uplink is not None:
        return run_parallel(arguments)
    check_writable(arguments.output)
    question = _question(arguments)
    with watching() as progress:
        found = answer(question, progress)
        bands = ranges(found, progress)
        mapped = [] if arguments.output is None else cells(found, _map_hosts(question), progress)
    if arguments.output is not None:
        write_text(arguments.output, _page(found, bands, mapped))
    if arguments.json:
        emit_json(as_json(found, bands))
    else:
        emit_sections(*sections(found, bands))
        if arguments.output is not None:
            emit(f"\nOpen {printable(arguments.output)}\n")
    return 0


def _page(found: Answer, bands: Sequence[BandwidthRange], mapped: Sequence[Cell]) -> str:
    try:
        from laconic.report.plan_page import render
    except ModuleNotFoundError as exc:
        # The library itself runs with torch and numpy alone, so an installation without jinja2 is legal.
        raise UsageError(f'--output needs {exc.name}. Install it with "pip install jinja2".') from exc
    return render(found, bands, mapped)


def _map_hosts(question: Question) -> list[int]:
    """Numbers of hosts around the cluster's own, each twice the one before; where hosts differ, only its own."""
    cluster = question.setting.cluster
    own = cluster.num_hosts
    if question.is_one_host or len(set(cluster.links)) > 1 or question.setting.workers != cluster.num_devices:
        return [own]
    first = max(2, own // 4)
    return sorted({first << power for power in range(_MAP_HOSTS)} | {own})


# -- the question ----------------------------------------------------------------------------------------------


def _question(arguments: Arguments) -> Question:
    device_name = arguments.device or _USUAL_DEVICE
    kind = None if device_name == "cpu" else device(device_name)
    assumed: list[str] = []
    measured: list[str] = []
    made, tokens = _model(arguments, kind, assumed)
    if arguments.compute is not None:
        made = made.scaled(compute_s=parse_quantity(arguments.compute, "time", "--compute"))
        measured.append(f"compute: {human_seconds(made.compute_s)} per step, as given")
    setting = _setting(arguments, assumed, measured)
    made_question = Question(
        workload=made,
        setting=setting,
        device=kind,
        learns_text=_learns_text(arguments, assumed),
        steps=_steps(arguments, made, tokens, setting.workers, assumed),
        limits=Limits(
            max_loss_gap=None
            if arguments.max_loss_gap is None
            else parse_quantity(arguments.max_loss_gap, "share", "--max-loss-gap"),
            lossless=arguments.lossless,
            memory_bytes=_memory(arguments, kind, assumed),
        ),
        measured=tuple(measured),
        assumed=tuple(assumed),
    )
    if made_question.is_one_host:
        for option in ("bandwidth", "delay"):
            if getattr(arguments, option) is not None:
                raise UsageError(
                    f"plan: --{option} has no effect on one host, whose workers use no network. Leave it out, or give "
                    "more --hosts; --inside sets the bandwidth between the GPUs of a host."
                )
    return made_question


def _model(arguments: Arguments, kind: KnownDevice | None, assumed: list[str]) -> tuple[Workload, int | None]:
    """The workload, and the tokens of one worker in one step where that is known."""
    if (arguments.model is None) == (arguments.params is None):
        raise UsageError("plan: give --model or --params, e.g. --params 350M, and not both.")
    batch = BATCH if arguments.batch is None else arguments.batch
    sequence = SEQUENCE if arguments.sequence is None else arguments.sequence
    if arguments.params is not None:
        number = parse_count(arguments.params, "--params", at_most=_MOST_PARAMS, example="350M or 7B")
        shape = guessed_shape(number, batch=batch, sequence=sequence)
        dtype = DTYPES[arguments.dtype or "float32"]
        made = decoder_workload(
            arguments.params, shape, _gpu(kind), dtype=dtype, shape_from="the shape of a decoder is guessed"
        )
        assumed.append(f"the model: {made.source}")
        return made, shape.tokens
    assert arguments.model is not None
    if arguments.model.endswith(".json") and is_config(arguments.model):
        shape, named = read_config(arguments.model, batch=batch, sequence=sequence)
        name = arguments.dtype or (named if named in DTYPES else "float32")
        made = decoder_workload(
            Path(arguments.model).stem,
            shape,
            _gpu(kind),
            dtype=DTYPES[name],
            shape_from=f"the shape is that of {arguments.model}",
        )
        assumed.append(f"the model: {made.source}")
        if unused := sizes_not_used(arguments.model):
            assumed.append(f"what these keys of the config say changes no shape: {', '.join(unused)}")
        return made, shape.tokens
    for option in ("batch", "sequence", "dtype"):
        if getattr(arguments, option) is not None:
            raise UsageError(f"plan: --{option} has an effect only with --params or a config.json.")
    if ".py:" in arguments.model:
        subject = load_subject(arguments.model)
        import torch

        here = "cuda" if torch.cuda.is_available() and kind is not None else "cpu"
        found = profile(subject, name=arguments.model, device=here)
        assumed.append(f"the model: {found.workload.source} Ranks compute as fast as this machine.")
        return found.workload, None
    made = workload(arguments.model)
    assumed.append(f"the model: {made.source}")
    return made, None


def _gpu(kind: KnownDevice | None) -> KnownDevice:
    if kind is None:
        raise UsageError(
            "plan: how long a guessed model computes on a CPU is not known. Profile it: --model script.py:make_model."
        )
    return kind


def _setting(arguments: Arguments, assumed: list[str], measured: list[str]) -> Setting:
    if arguments.cluster is None and (arguments.hosts is None or (arguments.bandwidth is None and arguments.hosts > 1)):
        raise UsageError(
            "plan: say where to train: --cluster NAME or FILE.toml, or --hosts N --bandwidth RATE, e.g. --hosts 4 "
            "--bandwidth 1gbit."
        )
    bandwidth_bps = None if arguments.bandwidth is None else parse_bandwidth(arguments.bandwidth, "--bandwidth")
    if bandwidth_bps is not None and bandwidth_bps <= 0:
        raise UsageError(
            "plan: with a bandwidth of zero nothing can be exchanged. Give --bandwidth RATE such as 1gbit."
        )
    inside_bps = None if arguments.inside is None else parse_bandwidth(arguments.inside, "--inside")
    if inside_bps is not None and inside_bps <= 0:
        raise UsageError("plan: with a bandwidth of zero inside hosts nothing can be exchanged. Leave --inside out.")
    place = Place(
        cluster=arguments.cluster or "ethernet-1g",
        hosts=arguments.hosts,
        devices=arguments.gpus_per_host,
        bandwidth_bps=bandwidth_bps,
        delay_s=None if arguments.delay is None else parse_quantity(arguments.delay, "time", "--delay"),
        inside_bps=inside_bps,
    )
    found = place.setting()
    cluster = found.cluster
    assumed += place.notes()
    if cluster.measured is not None:
        measured.append(f"links and collectives: {cluster.source or 'as the probe found them'}")
    elif arguments.cluster is not None and cluster.source:
        assumed.append(f"the cluster: {cluster.source}")
    else:
        link = cluster.links[0]
        assumed.append(
            f"links reach their full {human_rate(link.bandwidth_bps)} with a delay of {human_seconds(link.delay_s)}; "
            "measure them with laconic probe"
        )
    return found


def _learns_text(arguments: Arguments, assumed: list[str]) -> bool:
    if arguments.task != "auto":
        return arguments.task == "text"
    if arguments.model in IMAGE_WORKLOADS:
        return False
    known = arguments.params is not None or arguments.model in WORKLOADS or ".py:" not in (arguments.model or "")
    if not known:
        assumed.append("the model learns from text, as those did with which losses were measured; if not, --task other")
    return True


def _steps(arguments: Arguments, made: Workload, tokens: int | None, workers: int, assumed: list[str]) -> int:
    if arguments.steps is not None:
        return arguments.steps
    if tokens is None:
        return USUAL_STEPS
    assumed.append("training has the compute-optimal length: 20 tokens per parameter (arXiv:2203.15556)")
    return likely_steps(made.num_parameters, tokens * workers)


def _memory(arguments: Arguments, kind: KnownDevice | None, assumed: list[str]) -> int | None:
    if arguments.memory is not None:
        return int(parse_quantity(arguments.memory, "size", "--memory"))
    if kind is None:
        return None
    assumed.append(f"ranks run on {kind.name} with {kind.memory_bytes // 10**9} GB; change it by --device, --memory")
    return kind.memory_bytes
