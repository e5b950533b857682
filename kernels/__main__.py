"""Command line of the kernels: receives a command, hands on to the module that has it.

python -m kernels explain 4096 4096 4096 --device h200
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from kernels.libraries import NotBuilt, UntrustedFolder
from kernels.problem import Activation, BiasDim, DType, Epilogue, Problem, Unsupported
from kernels.selector import Choice, Variant, choose

Main = Callable[[Sequence[str]], int]

# Commands that have a module of their own with a `main(argv)`.
ELSEWHERE = {
    "build": ("kernels.build", "compile kernels ahead of time; no GPU needed"),
    "gates": ("kernels.gates", "check the machine code of what is built"),
    "tune": ("kernels.tune", "measure the variants on this device and keep the times"),
    "ladder": ("kernels.climb", "climb the nine steps on this GPU or a virtual one; a table and a picture"),
    "predict": ("kernels.predict", "what a model says of a kernel's time on a chip"),
    "trace": ("kernels.trace", "run a kernel, virtual or on a GPU, and write what its roles do when"),
}
#: Extra of this package → the modules and distributions that it brings.
EXTRAS = {
    "torch": ("torch",),
    "compiler": ("cutlass", "nvidia-cutlass-dsl", "tvm_ffi"),
    "plot": ("matplotlib",),
}
CHIPS = {"h200": "sm_90a", "b200": "sm_100a"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = commands()
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage(known))
        return 0
    name, *rest = arguments
    if name not in known:
        print(f"there is no command {name!r}\n\n{usage(known)}", file=sys.stderr)
        return 2
    try:
        return known[name][0](rest)
    except (NotBuilt, UntrustedFolder) as error:
        complaint = str(error)
    except ModuleNotFoundError as error:
        lacking = next((extra for extra, names in EXTRAS.items() if error.name in names), None)
        if lacking is None:
            raise
        complaint = f"{error.name} isn't installed: pip install 'gemm-service[{lacking}]'"
    print(f"python -m kernels {name}: {complaint}", file=sys.stderr)
    return 2


def commands() -> Mapping[str, tuple[Main, str]]:
    """What can be done here, with a line on each."""
    here: dict[str, tuple[Main, str]] = {
        "explain": (explain, "what would run for a problem, and why not the others"),
        "variants": (variants, "the variants of a device, and which may run"),
        "verify": (verify, "test the variants of this device, or kernels on the virtual GPU"),
    }
    for name, (module, text) in ELSEWHERE.items():
        if _exists(module):
            here[name] = (_elsewhere(module), text)
    return dict(sorted(here.items()))


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _elsewhere(module: str) -> Main:
    def run(argv: Sequence[str]) -> int:
        status: int = import_module(module).main(argv)
        return status

    return run


def usage(known: Mapping[str, tuple[Main, str]]) -> str:
    """Help on the whole."""
    lines = [f"  {name:<10} {text}" for name, (_, text) in known.items()]
    return "\n".join(["usage: python -m kernels <command> [--help]", "", *lines])


def explain(argv: Sequence[str]) -> int:
    """Candidates for a problem as a table."""
    parser = argparse.ArgumentParser(prog="python -m kernels explain", description=commands()["explain"][1])
    for name in ("m", "n", "k"):
        parser.add_argument(name, type=int, metavar=name.upper())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", type=DType, default=DType.FP16, choices=list(DType))
    parser.add_argument("--out-dtype", type=DType, choices=list(DType), help="default: the operands'")
    parser.add_argument(
        "--layout", default="nn", choices=["nn", "nt", "tn", "tt"], help="t: stored transposed"
    )
    parser.add_argument("--bias", type=BiasDim, choices=list(BiasDim))
    parser.add_argument("--activation", type=Activation, default=Activation.NONE, choices=list(Activation))
    parser.add_argument("--fast", action="store_true", help="without batch_invariant")
    parser.add_argument("--variant", default="auto")
    _device_option(parser)
    options = parser.parse_args(argv)
    problem = Problem(
        options.m,
        options.n,
        options.k,
        options.batch,
        options.dtype,
        options.out_dtype or options.dtype,
        trans_a=options.layout[0] == "t",
        trans_b=options.layout[1] == "t",
        epilogue=Epilogue(bias=options.bias, activation=options.activation),
        batch_invariant=not options.fast,
    )
    try:
        choice, place = _choice(problem, options.device, options.variant)
    except Unsupported as reason:
        print(f"nothing can run this: {reason.because}", file=sys.stderr)
        return 1
    _print_choice(choice, place)
    return 0


def _device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, the number of a GPU, or h200 or b200 by their datasheet"
    )


def _choice(problem: Problem, device: str, variant: str) -> tuple[Choice, str]:
    """The choice and the name of the device that it is for."""
    from kernels import family
    from kernels.device import DATASHEETS, describe_cpu
    from kernels.tune import Times, cpu_build, gpu_index

    if device in CHIPS:
        sheet = DATASHEETS[CHIPS[device]]
        chip = family.variants(sheet.arch)
        return choose(
            _packed(problem), sheet, variants=chip, variant=variant
        ), f"{sheet.name}, by its datasheet"
    index = gpu_index(device)
    if index is None:
        cpu = describe_cpu()
        table = Times(cpu, cpu_build()).read()
        return choose(problem, cpu, table, variants=family.variants("cpu"), variant=variant), cpu.name
    from kernels.runtime import runtime

    gpu = runtime(index)
    return gpu.choose(problem, variant), gpu.device.name


def _packed(problem: Problem) -> Problem:
    from kernels.operands import as_packed

    return as_packed(problem)


def _print_choice(choice: Choice, device: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("variant", "time", "from", "why not", title=device, title_justify="left")
    for each in sorted(choice.candidates, key=lambda c: (c.because is not None, c.seconds or 0.0)):
        took = "" if each.seconds is None else f"{each.seconds * 1e6:,.1f} µs"
        source = "" if each.seconds is None else "measured" if each.measured else "estimate"
        style = "bold" if each.variant == choice.variant else None
        table.add_row(each.variant, took, source, each.because or "", style=style)
    console = Console()
    console.print(table)
    console.print(f"{choice.variant} ({choice.reason}): {choice.why}", highlight=False)


def variants(argv: Sequence[str]) -> int:
    """The variants of a device."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m kernels variants", description=commands()["variants"][1])
    _device_option(parser)
    options = parser.parse_args(argv)
    table = Table("variant", "step", "state")
    for each, state in _states(options.device):
        table.add_row(each.name, str(each.step or ""), state)
    Console().print(table)
    return 0


def _states(device: str) -> list[tuple[Variant, str]]:
    from kernels import family, reference
    from kernels.libraries import default_root, read_manifest
    from kernels.tune import gpu_index

    if device in CHIPS:
        arch = CHIPS[device]
        built = len(read_manifest(default_root(), arch).functions)
        state = (
            f"{built} functions are built for {arch}"
            if built
            else f"not built: python -m kernels build --arch {arch}"
        )
        return [(each, state if each.step else "needs the device") for each in family.variants(arch)]
    index = gpu_index(device)
    if index is None:
        return [(each, reference.self_test(each.backend).detail) for each in reference.variants()]
    from kernels.device_file import default_folder
    from kernels.probe import Kept
    from kernels.runtime import runtime

    gpu = runtime(index)
    known = Kept(default_folder(), gpu.device.key, gpu.build_hash).read()
    states = []
    for each in gpu.variants:
        told = known.get(each.name)
        tested = f"self-test: {told.ended} {told.detail}".strip() if told else "not tested on this device yet"
        states.append((each, gpu.barred.get(each.name, tested)))
    return states


def verify(argv: Sequence[str]) -> int:
    """Test what this device has; a wrong variant makes the status 1."""
    if "--device" in argv and "virtual" in argv and _exists("kernels.virtual.verify"):
        rest = [each for each in argv if each not in ("--device", "virtual")]
        return _elsewhere("kernels.virtual.verify")(rest)
    parser = argparse.ArgumentParser(prog="python -m kernels verify", description=commands()["verify"][1])
    parser.add_argument("--device", default="auto", help="auto, cpu, the number of a GPU, or virtual")
    parser.add_argument("--only", default="", help="variants whose name holds this")
    options = parser.parse_args(argv)
    from kernels.tune import gpu_index

    index = gpu_index(options.device)
    return _verify_cpu(options.only) if index is None else _verify_gpu(index, options.only)


def _verify_cpu(only: str) -> int:
    import numpy as np

    from kernels import reference, selftest
    from kernels.elementwise import NUMPY
    from kernels.verify import check

    wrong = 0
    for each in reference.variants():
        if only not in each.name:
            continue
        for dtype in DType:
            for m, n, k, tail, _ in selftest.CASES:
                problem = Problem(m, n, k, dtype=dtype, out_dtype=dtype, epilogue=tail)
                a, b, c, bias = selftest.host_operands(problem)
                out = np.empty((m, n), NUMPY[dtype])
                reference.compute(problem, a, b, out, c, bias, backend=each.backend)
                verdict = check(problem, out, a, b, c, bias)
                wrong += not verdict.ok
                print(
                    f"{'ok   ' if verdict.ok else 'WRONG'} {each.name} {dtype} {m}x{n}x{k}: {verdict.detail}"
                )
        print(f"      {each.name}: {reference.self_test(each.backend).detail}")
    return 1 if wrong else 0


def _verify_gpu(index: int, only: str) -> int:
    from kernels.probe import Ended, Outcome, probe
    from kernels.runtime import runtime

    gpu = runtime(index)
    names = [each.name for each in gpu.variants if each.name not in gpu.barred and only in each.name]

    def told(outcome: Outcome) -> None:
        print(f"{outcome.ended:<6} {outcome.variant}  {outcome.detail}".rstrip(), flush=True)

    outcomes = probe(names, index=index, on_outcome=told)
    for name, because in gpu.barred.items():
        print(f"not run {name}: {because}")
    return 0 if all(each.ended in (Ended.RIGHT, Ended.BITS) for each in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
