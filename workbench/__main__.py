"""The commands: ``python -m workbench ...``, also installed as ``moe-workbench``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.catalogue import cache_path
from workbench.core.errors import ScenarioError, WorkbenchError
from workbench.core.units import format_seconds, parse_bytes

if TYPE_CHECKING:
    from workbench.hardware import Machine
    from workbench.jobs import LLM
    from workbench.models import ModelConfig

    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_RECIPES = (
    "mix-s (0.23 GB), mix-m (0.46 GB), mix-b (3.0 GB), mix-w (12.5 GB), qwen-s (0.25 GB, shared experts), deepseek-s "
    "(0.22 GB, latents too) or odd-..."
)

_CARD = "default: the card where torch takes one"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it succeeded, 1 with one line on stderr if it could not, 130 if it was interrupted."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except WorkbenchError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moe-workbench", description="Bound, simulate and run MoE inference pipelines."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    report = commands.add_parser(
        "report", help="the main job without a browser: report.html, results.json, timeline.json.gz"
    )
    report.add_argument("--out", type=Path, default=Path("out"), help="folder to write to (default: out)")
    report.set_defaults(command=_report)
    advice = commands.add_parser("advise", help="a first answer: where a model fits on a machine, and how fast it is")
    advice.add_argument(
        "--model", required=True, help="a name of the catalogue, a config.json or its folder, or a GGUF file"
    )
    advice.add_argument("--machine", help="a name of the catalogue, or a record that Machine.save wrote")
    advice.add_argument("--gpu", help="or its parts, by their names in the catalogue: the GPU, or a chip with both")
    advice.add_argument("--cpu", help="the CPU")
    advice.add_argument("--memory", help="DRAM of the host, as 64GB or '64GB ddr5-6000 x2'")
    advice.add_argument("--link", help="a name of the catalogue, or a rate in B/s, as 25GB (default: the GPU's own)")
    advice.add_argument("--weights", help="format of the weights, as int4 (default: the model's own)")
    advice.add_argument("--drive", help="a name of the catalogue: also tells how long it reads the weights")
    advice.add_argument("--prompt", type=_count, default=512, help="tokens of each prompt (default: 512)")
    advice.add_argument("--output", type=_count, default=128, help="output tokens of each request (default: 128)")
    advice.add_argument("--batch", type=_count, default=32, help="requests of the batch (default: 32)")
    advice.set_defaults(command=_advise)
    _add_generate(commands)
    _add_serve(commands)
    again = commands.add_parser("reproduce", help="published values beside computed ones: papers, and public runs")
    again.add_argument(
        "names", nargs="*", metavar="NAME", help="a paper such as moe_lens, or offload_runs; default: all"
    )
    again.set_defaults(command=_reproduce)
    make = commands.add_parser("make-checkpoint", help="make a seeded random checkpoint")
    make.add_argument("name", help=_RECIPES)
    make.add_argument("--out", type=Path, help="folder to write to (default: in the user's cache)")
    make.add_argument("--seed", type=int, default=0)
    make.set_defaults(command=_make_checkpoint)
    train = commands.add_parser(
        "train-tiny", help="train the tiny model on exercises; continues what was interrupted in that folder"
    )
    train.add_argument("--out", type=Path, help="folder to write to (default: in the user's cache)")
    train.add_argument("--steps", type=int, help="updates (default: as the shipped model, 20 minutes on two cores)")
    train.add_argument("--seed", type=int, default=0)
    train.set_defaults(command=_train_tiny)
    bench = commands.add_parser("bench", help="benchmarks: how well runs are predicted, what overlap gains")
    benches = bench.add_subparsers(required=True, metavar="which")
    sim = benches.add_parser("sim", help="random settings, simulated and run; the residual by cause")
    sim.add_argument("--models", nargs="+", metavar="NAME", help=f"{_RECIPES}; default: the four odd ones")
    sim.add_argument("--settings", type=_count, default=56)
    sim.add_argument("--repeats", type=_count, default=3, help="undisturbed runs of a setting (default: 3)")
    sim.add_argument("--seed", type=_seed, default=0)
    sim.add_argument("--json", type=_file, help="file to write the record to")
    sim.set_defaults(command=_bench_sim)
    order = benches.add_parser("schedules", help="drawn scenarios, simulated under every schedule: which is best where")
    order.add_argument("--scenarios", type=_count, default=60, help="so many that fit (default: 60)")
    order.add_argument("--seed", type=_seed, default=0)
    order.add_argument("--json", type=_file, help="file to write the record to")
    order.set_defaults(command=_bench_schedules)
    speed = benches.add_parser("simulator", help="how fast simulations are: a large job in both details, and a sweep")
    speed.add_argument("--repeats", type=_count, default=5, help="times that the large job is simulated (default: 5)")
    speed.add_argument("--json", type=_file, help="file to write the record to")
    speed.set_defaults(command=_bench_simulator)
    best = benches.add_parser("optimize", help="answers of the auto-scheduler and the best named systems, run in turn")
    best.add_argument("--models", nargs="+", metavar="NAME", help=f"{_RECIPES}; default: the four odd ones")
    best.add_argument("--settings", type=_count, default=12)
    best.add_argument("--repeats", type=_count, default=3, help="undisturbed runs of each (default: 3)")
    best.add_argument("--budget", default="30 s", help="time for each search (default: 30 s)")
    best.add_argument("--seed", type=_seed, default=0)
    best.add_argument("--json", type=_file, help="file to write the record to")
    best.set_defaults(command=_bench_optimize)
    cpu = benches.add_parser("cpu", help="attention and experts against memory, arithmetic, torch and C")
    cpu.add_argument("--seconds", type=_seconds, default=60, help="how long to repeat, default: 60")
    cpu.add_argument("--shapes", action="store_true", help="other head dims and groups, our kernel alone")
    cpu.add_argument("--picture", type=_picture, help="file to draw the roofline into: .png, .svg or .pdf")
    cpu.add_argument("--json", type=_file, help="file to write the record to")
    cpu.set_defaults(command=_bench_cpu)
    tuning = benches.add_parser("tuning", help="settings of the CPU kernels, spoilt and found again")
    tuning.add_argument("--tries", type=_count, default=3, help="spoilt tables (default: 3)")
    tuning.add_argument("--seed", type=_seed, default=0)
    tuning.add_argument("--seconds", type=_seconds, default=600, help="for each search, about (default: 600)")
    tuning.set_defaults(command=_bench_tuning)
    experts = benches.add_parser("experts", help="routed experts on the CPU by tokens per expert: formats and torch")
    experts.add_argument("--seconds", type=_seconds, default=60, help="how long to repeat, default: 60")
    experts.add_argument("--json", type=_file, help="file to write the record to")
    experts.set_defaults(command=_bench_experts)
    moe = benches.add_parser("moe", help="a layer's routed experts, on the GPU if there is one: ours, torch, Liger")
    moe.add_argument("--seconds", type=_seconds, default=120, help="how long to repeat, default: 120")
    moe.add_argument("--json", type=_file, help="file to write the record to")
    moe.set_defaults(command=_bench_moe)
    card = benches.add_parser("gpu", help="the GPU at hand: ceilings, errors and speed of every kernel, other tiles")
    card.add_argument("--minutes", type=float, default=9, help="begin nothing after so long (default: 9)")
    card.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder to write to and go on from")
    card.add_argument("--dry-run", action="store_true", help="rehearse without a GPU: tiny operands, interpreted")
    card.set_defaults(command=_bench_gpu)
    hybrid = benches.add_parser("hybrid", help="runs with the gpu lane on the card: right tokens, and passes measured")
    hybrid.add_argument("--out", type=Path, default=Path("out/hybrid"), help="folder to write to and go on from")
    hybrid.add_argument("--model", default="mix-b", help=f"{_RECIPES}; default: mix-b")
    hybrid.add_argument("--gpu-memory", default="2GB", help="the card's memory that a run may take (default: 2GB)")
    hybrid.add_argument("--minutes", type=float, default=20, help="begin nothing after so long (default: 20)")
    hybrid.set_defaults(command=_bench_hybrid)
    overlap = benches.add_parser(
        "overlap", help="steady decode passes: VSLPipe, CGOPipe and Sequential, measured and simulated"
    )
    overlap.add_argument("--model", default="mix-b", help=f"{_RECIPES}; default: mix-b")
    overlap.add_argument("--rows", type=_count, default=256, help="decodes per pass (default: 256)")
    overlap.add_argument("--context", type=_count, help="KV entries of each (default: as much work for cpu as for gpu)")
    overlap.add_argument("--link", type=_link, help="B/s, as 2GB (default: weights take as long as computing)")
    overlap.add_argument("--repeats", type=_count, default=9, help="undisturbed passes (default: 9)")
    overlap.add_argument("--json", type=_file, help="file to write the record to")
    overlap.set_defaults(command=_bench_overlap)
    shares = benches.add_parser("shares", help="weights and experts that stay on the GPU, on a link that binds")
    shares.add_argument("--model", default="mix-b", help=f"{_RECIPES}; default: mix-b")
    shares.add_argument("--rows", type=_count, default=2, help="decodes per pass (default: 2)")
    shares.add_argument("--repeats", type=_count, default=3, help="runs of each placement (default: 3)")
    shares.add_argument("--json", type=_file, help="file to write the record to")
    shares.set_defaults(command=_bench_shares)
    rounding = benches.add_parser("rounding", help="the shipped model's exam with experts in bf16, INT8 and INT4")
    rounding.add_argument("--questions", type=_count, default=1200, help="default: 1200")
    rounding.add_argument("--json", type=_file, help="file to write the record to")
    rounding.set_defaults(command=_bench_rounding)
    e2e = benches.add_parser("e2e", help="whole answers, beside transformers, vLLM and llama.cpp where they can be had")
    e2e.add_argument("--model", default="mix-b", help=f"{_RECIPES}; default: mix-b")
    e2e.add_argument("--loads", nargs="+", choices=("mixed", "decode", "one"), default=["mixed", "decode", "one"])
    e2e.add_argument("--engines", nargs="+", metavar="NAME", help="such as 'workbench bf16' vllm; default: all")
    e2e.add_argument("--python", nargs="+", default=[], metavar="ENGINE=FILE", help="interpreter of its environment")
    e2e.add_argument("--rounds", type=_count, default=3, help="runs of each engine on each load (default: 3)")
    e2e.add_argument("--json", type=_file, help="file to write the record to")
    e2e.set_defaults(command=_bench_e2e)
    _add_tune(commands)
    doctor = commands.add_parser(
        "doctor", help="this computer: what it has, which code runs, what is set wrongly, speed"
    )
    doctor.add_argument("--json", type=_file, help="file to write the measured rates to")
    doctor.set_defaults(command=_doctor)
    measure = commands.add_parser("measure", help="measure this computer's rates for Machine.local")
    measure.add_argument("--out", type=_file, help="JSON file to write (default: print it)")
    measure.add_argument("--device", choices=("cpu", "cuda"), help=f"what computes the gpu lane ({_CARD})")
    measure.set_defaults(command=_measure)
    return parser


def _add_tune(commands: _Commands) -> None:
    tune = commands.add_parser(
        "tune", help="time what kernels can be set to on the computer at hand, and write the fastest down"
    )
    tune.add_argument("--cpu", action="store_true", help="the settings of the CPU kernels, not the GPU's tiles")
    tune.add_argument("--seconds", type=_seconds, default=600, help="with --cpu: how long, about (default: 600)")
    tune.add_argument("--weights", nargs="+", choices=("16-bit", "8-bit", "4-bit"), help="on the GPU; default: all")
    tune.add_argument(
        "--out",
        type=Path,
        help="table to write (default: kernels_triton/moe/tiles.json, with --cpu one in the user's cache)",
    )
    tune.add_argument("--dry-run", action="store_true", help="on the GPU: list the candidates, compile none")
    tune.set_defaults(command=_tune)


def _add_generate(commands: _Commands) -> None:
    generate = commands.add_parser(
        "generate",
        help="finish a file of requests in OpenAI's batch format; begun again, it goes on from where it was killed",
        epilog="example: %(prog)s data/models/tiny-moe requests.jsonl --out answers.jsonl",
    )
    generate.add_argument("model", type=Path, help="folder of a checkpoint")
    generate.add_argument("requests", type=Path, help="file with a request in each line: custom_id and body")
    generate.add_argument("--out", type=_file, required=True, help="file of the answers, to which it adds")
    generate.add_argument(
        "--engines", type=_count, help="so many engines by Ray, on all machines of its cluster (default: one, without)"
    )
    _add_engine(generate)
    generate.set_defaults(command=_generate)


def _add_serve(commands: _Commands) -> None:
    server = commands.add_parser(
        "serve",
        help="a small server for programs on this computer: /v1/completions and /v1/chat/completions",
        epilog="example: %(prog)s data/models/tiny-moe --port 8000 --scheduler ContinuousBatching",
    )
    server.add_argument("model", type=Path, help="folder of a checkpoint")
    server.add_argument("--port", type=_port, default=8000, help="0 takes one that is free (default: 8000)")
    server.add_argument(
        "--longest", type=_count, help="most tokens of prompt and answer together (default: the model's most, or 4096)"
    )
    _add_engine(server)
    server.set_defaults(command=_serve)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """The options of commands that load a model and serve requests with it."""
    parser.add_argument("--weights", help="precision of the weights: fp32, bf16, int8, int4 (default: the model's own)")
    parser.add_argument("--kv", help="precision of the KV cache: fp32 or bf16 (default: the model's own)")
    parser.add_argument("--kv-capacity", help="size of the KV cache, as 4GB (default: 512 tokens of each request)")
    parser.add_argument("--together", type=_count, default=64, help="most requests that run at once (default: 64)")
    parser.add_argument("--max-tokens", type=_count, default=256, help="where a request says nothing (default: 256)")
    parser.add_argument("--scheduler", default="ResourceAware", help="its name (default: ResourceAware)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help=f"cuda: on the NVIDIA card too ({_CARD})")


def _port(text: str) -> int:
    value = _whole(text, 0)
    if value > 65535:
        raise argparse.ArgumentTypeError(f"give a port from 0 to 65535, not {text!r}.")
    return value


def _count(text: str) -> int:
    return _whole(text, 1)


def _seed(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"give a whole number of at least {least}, not {text!r}.")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"give a positive number of seconds such as 60, not {text!r}.")
    return value


def _link(text: str) -> float:
    try:
        return parse_bytes(text, what="rate")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(text: str) -> Path:
    """Path of a file that can be written; folders that are missing are made when it is."""
    path = Path(text)
    nearest = next(each for each in (path.absolute(), *path.absolute().parents) if os.path.exists(each))
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give a file in it.")
    if nearest != path.absolute() and not nearest.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written, since {nearest} is no folder; give another.")
    if not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: no permission for {nearest}; give another.")
    return path


def _picture(text: str) -> Path:
    """Path of a picture in a format that matplotlib writes; pyplot, which takes longer, is not imported for that."""
    from matplotlib.backend_bases import FigureCanvasBase

    path = _file(text)
    if path.suffix.lower().removeprefix(".") not in FigureCanvasBase.filetypes:
        raise argparse.ArgumentTypeError(
            f"{text!r} ends in no known format; give a file such as roof.png, .svg or .pdf."
        )
    return path


def _report(options: argparse.Namespace) -> None:
    from workbench.analysis.report import write_report

    write_report(options.out)


def _advise(options: argparse.Namespace) -> None:
    from workbench.analysis.advise import advise
    from workbench.hardware.processors import drives

    drive = None if options.drive is None else drives[options.drive]
    given = {key: getattr(options, key) for key in ("prompt", "output", "batch", "weights")}
    advice = advise(_model(options.model), _machine(options), **given)
    print(advice)
    if drive is not None:
        print(f"{options.drive} reads the weights in {format_seconds(advice.weight_bytes / drive.number)} at best.")


def _model(text: str) -> ModelConfig:
    """A model of a file or a folder, of the Hugging Face hub, or of the catalogue."""
    from workbench.models import model, models

    return model(text) if os.path.exists(text) or "/" in text else models[text]


def _machine(options: argparse.Namespace) -> Machine:
    """A machine of the catalogue, of a record, or put together of parts."""
    from workbench.hardware import Machine, machines
    from workbench.hardware.assembly import machine

    parts = {
        key: getattr(options, key) for key in ("gpu", "cpu", "memory", "link") if getattr(options, key) is not None
    }
    if options.machine is None:
        if "gpu" not in parts:
            raise ScenarioError("advise needs a machine: give --machine NAME, or --gpu, --cpu and --memory.")
        return machine(**parts)
    if parts:
        raise ScenarioError(f"--machine {options.machine} has all its parts; leave out --{' and --'.join(parts)}.")
    known = options.machine in machines or not os.path.exists(options.machine)
    return machines[options.machine] if known else Machine.load(options.machine)


def _llm(options: argparse.Namespace) -> LLM:
    from workbench.jobs import LLM
    from workbench.scheduler.registry import scheduler_of

    scheduler = scheduler_of(options.scheduler)
    return LLM(options.model, weights=options.weights, kv=options.kv, scheduler=scheduler, device=options.device)


def _generate(options: argparse.Namespace) -> None:
    room = {key: getattr(options, key) for key in ("max_tokens", "together", "kv_capacity")}
    print(_llm(options).generate_file(options.requests, out=options.out, engines=options.engines, **room))


def _serve(options: argparse.Namespace) -> None:
    from workbench.server import serve

    room = {key: getattr(options, key) for key in ("max_tokens", "together", "kv_capacity", "longest", "port")}
    serve(_llm(options), **room)


def _reproduce(options: argparse.Namespace) -> None:
    from workbench.reproductions import papers, reproduce
    from workbench.reproductions.offload_runs import DATA
    from workbench.reproductions.offload_tables import offload_report

    for name in options.names or [*papers(), DATA]:
        print(offload_report() if name == DATA else reproduce(name).text(), end="\n\n", flush=True)


def _make_checkpoint(options: argparse.Namespace) -> None:
    from workbench.engine import make_checkpoint

    print(make_checkpoint(options.name, options.out, seed=options.seed))


def _train_tiny(options: argparse.Namespace) -> None:
    from workbench.engine.tiny_model.tiny import train_tiny
    from workbench.engine.tiny_model.training import Settings

    given = {"seed": options.seed} | ({"steps": options.steps} if options.steps is not None else {})
    print(train_tiny(options.out or cache_path("models/tiny-moe"), Settings(**given)))


def _bench_cpu(options: argparse.Namespace) -> None:
    from workbench.bench.cpu.bench import bench_cpu

    bench_cpu(seconds=options.seconds, shapes=options.shapes, json=options.json, picture=options.picture)


def _bench_tuning(options: argparse.Namespace) -> None:
    from workbench.bench.tuning.tune import bench_tuning

    bench_tuning(tries=options.tries, seed=options.seed, seconds=options.seconds)


def _bench_experts(options: argparse.Namespace) -> None:
    from workbench.bench.experts.bench import bench_experts

    bench_experts(seconds=options.seconds, json=options.json)


def _bench_moe(options: argparse.Namespace) -> None:
    from workbench.bench.moe.bench import bench_moe

    bench_moe(seconds=options.seconds, json=options.json)


def _bench_gpu(options: argparse.Namespace) -> None:
    from workbench.bench.gpu.bench import CardLostError, bench_gpu

    begin = time.monotonic()
    try:
        bench_gpu(minutes=options.minutes, out=options.out, dry_run=options.dry_run)
    except CardLostError as lost:  # the step is kept as failed: this process goes on behind it with a new context
        print(f"{lost} Doing so.", flush=True)
        left = options.minutes - (time.monotonic() - begin) / 60
        words = ["bench", "gpu", "--minutes", str(left), "--out", str(options.out)]
        os.execv(sys.executable, [sys.executable, "-m", "workbench", *words])


def _bench_hybrid(options: argparse.Namespace) -> None:
    from workbench.bench.hybrid.bench import bench_hybrid

    if not bench_hybrid(options.model, gpu_memory=options.gpu_memory, minutes=options.minutes, out=options.out):
        sys.exit("not all answers with the gpu lane on the card are right.")


def _bench_sim(options: argparse.Namespace) -> None:
    from workbench.bench.live.sim import MODELS, bench_sim

    bench_sim(
        options.models or MODELS,
        settings=options.settings,
        repeats=options.repeats,
        seed=options.seed,
        json=options.json,
    )


def _bench_optimize(options: argparse.Namespace) -> None:
    from workbench.bench.live.optimum import bench_optimum
    from workbench.bench.live.sim import MODELS

    given = {key: getattr(options, key) for key in ("settings", "repeats", "seed", "budget", "json")}
    bench_optimum(options.models or MODELS, **given)


def _bench_schedules(options: argparse.Namespace) -> None:
    from workbench.bench.schedules import bench_schedules

    bench_schedules(scenarios=options.scenarios, seed=options.seed, json=options.json)


def _bench_simulator(options: argparse.Namespace) -> None:
    from workbench.bench.simulator import bench_simulator

    bench_simulator(repeats=options.repeats, json=options.json)


def _bench_overlap(options: argparse.Namespace) -> None:
    from workbench.bench.live.overlap import bench_overlap

    given = {key: getattr(options, key) for key in ("rows", "context", "repeats", "json")}
    bench_overlap(options.model, rate=options.link, **given)


def _bench_shares(options: argparse.Namespace) -> None:
    from workbench.bench.live.shares import bench_shares

    bench_shares(options.model, rows=options.rows, repeats=options.repeats, json=options.json)


def _bench_rounding(options: argparse.Namespace) -> None:
    from workbench.bench.live.rounding import bench_rounding

    bench_rounding(options.questions, json=options.json)


def _bench_e2e(options: argparse.Namespace) -> None:
    from workbench.bench.e2e.bench import ENGINES, bench_e2e

    pythons = dict(text.partition("=")[::2] for text in options.python)
    given = {key: getattr(options, key) for key in ("loads", "rounds", "json")}
    bench_e2e(options.model, engines=options.engines or list(ENGINES), pythons=pythons, **given)


def _tune(options: argparse.Namespace) -> None:
    if options.cpu:
        from workbench.bench.tuning.tune import tune_cpu

        if options.dry_run or options.weights:
            raise ScenarioError("--dry-run and --weights are for the GPU's tiles; leave them out with --cpu.")
        tune_cpu(seconds=options.seconds, out=options.out)
        return
    from workbench.bench.gpu.moe_tiles import tune

    tune(weights=options.weights, out=options.out, dry_run=options.dry_run)


def _doctor(options: argparse.Namespace) -> None:
    from workbench.bench.doctor import doctor

    doctor(json=options.json)


def _measure(options: argparse.Namespace) -> None:
    from workbench.hardware.machine import usual_device

    if (options.device or usual_device()) == "cuda":
        from workbench.engine.calibration.card import measure_card
        from workbench.engine.devices.cuda import CudaDriver

        machine = measure_card(CudaDriver())
    else:
        from workbench.engine.calibration.measure import measure_machine

        machine = measure_machine()
    print(machine.save(options.out) if options.out else machine.to_json())


if __name__ == "__main__":
    sys.exit(main())
