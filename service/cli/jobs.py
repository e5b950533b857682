"""`gemm-service jobs`: receives job files and ids, submits, watches, fetches results, cancels."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service import cli
from service.cli.common import check_folder, client_of, guarded, operand, save, service_flags
from service.client import Client, Handle, Job, Step

_EXAMPLES = """\
  gemm-service jobs submit job.json --wait --results out/   submit, show progress, fetch every result
  gemm-service jobs                                         list
  gemm-service jobs show ID
  gemm-service jobs wait ID
  gemm-service jobs result ID STEP -o D.npy
  gemm-service jobs cancel ID

A job file names .npy files (beside it), handles and earlier steps; other fields are the service's parameters:
  {"steps": [{"id": "h", "a": "X.npy", "b": "handle:w1", "activation": "relu"},
             {"id": "y", "a": {"step": "h"}, "b": "handle:w2"}]}
"""


def main(argv: Sequence[str]) -> int:
    """`gemm-service jobs`."""
    parser = cli.parser("jobs", "Submit jobs, wait for them, fetch their results.", _EXAMPLES)
    commands = parser.add_subparsers(dest="do", metavar="{list,submit,show,wait,result,cancel}")
    commands.add_parser("list", help="list them (also without a command)")
    submit = commands.add_parser("submit", help="hand in a job file")
    submit.add_argument("file", type=Path)
    submit.add_argument("--wait", action="store_true", help="show progress until it has ended")
    submit.add_argument("--results", type=Path, metavar="FOLDER", help="with --wait: write STEP.npy there")
    submit.add_argument("--idempotency-key", help="the same key names the same job, however often it is sent")
    for name, text in (("show", "how it stands"), ("wait", "wait for its end"), ("cancel", "cancel it")):
        commands.add_parser(name, help=text).add_argument("id")
    result = commands.add_parser("result", help="fetch a step's result")
    result.add_argument("id")
    result.add_argument("step")
    result.add_argument("-o", "--output", type=Path, help="default: STEP.npy")
    service_flags(parser, *commands.choices.values())
    given = parser.parse_args(argv)
    if given.do == "submit" and given.results is not None and not given.wait:
        return cli.complain("--results goes with --wait")
    return guarded(lambda: _work(given))


def _work(given: argparse.Namespace) -> int:
    with client_of(given) as client:
        match given.do:
            case "submit":
                _submit(client, given)
            case "show":
                _show(client.job(given.id))
            case "wait":
                _show(client.wait(given.id, timeout=given.timeout, progress=True))
            case "cancel":
                client.cancel(given.id)
                # One that had ended stays as it was.
                print(f"{given.id} is {client.job(given.id).state}")
            case "result":
                output = given.output or Path(f"{given.step}.npy")
                check_folder(output)
                save(output, client.result(given.id, given.step))
                print(output)
            case _:
                for job in client.jobs():
                    counts = job.document.get("counts", {})
                    print(f"{job.id:40} {job.state:10}", *(f"{n} {state}" for state, n in counts.items()))
    return 0


def _submit(client: Client, given: argparse.Namespace) -> None:
    steps = read(given.file)
    job = client.submit(steps, idempotency_key=given.idempotency_key)
    print(job.id, flush=True)
    if not given.wait:
        return
    _show(client.wait(job, timeout=given.timeout, progress=True))
    if given.results is not None:
        given.results.mkdir(parents=True, exist_ok=True)
        for step in steps:
            if step.out is None:
                save(given.results / f"{step.id}.npy", client.result(job, step))


def _show(job: Job) -> None:
    print(f"{job.id}: {job.state}")
    for step in job.steps:
        print(f"  {step.id:24} {step.state:10} {step.variant} {step.detail}".rstrip())


def read(path: Path) -> list[Step]:
    """The steps of a job file; ValueError says what is wrong with it."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["steps"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: a job file is JSON with a list "steps": {error}') from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f'{path}: "steps" is a list of objects')
    made: dict[str, Step] = {}
    for row in rows:
        fields = dict(row)
        try:
            name, a, b = fields.pop("id"), fields.pop("a"), fields.pop("b")
        except KeyError as error:
            raise ValueError(f"{path}: a step lacks {error}") from None
        if name in made:
            raise ValueError(f"{path}: two steps are called {name!r}")
        operands = [_operand(value, path.parent, made) for value in (a, b)]
        more = {key: _operand(fields.pop(key), path.parent, made) for key in ("c", "bias") if key in fields}
        kept = _kept(fields.pop("out", "inline"))
        made[name] = Step(name, operands[0], operands[1], out=kept, options=fields, **more)
    return list(made.values())


def _kept(out: Any) -> Handle | None:
    """Where a step's result goes: `handle:NAME` or {"handle": NAME}; else it stays with the job."""
    if out == "inline":
        return None
    name = out.get("handle") if isinstance(out, Mapping) else out
    if not isinstance(name, str) or (name is out and not name.startswith("handle:")):
        raise ValueError('out of a step is "handle:NAME" or {"handle": "NAME"}')
    return Handle(name.removeprefix("handle:"))


def _operand(value: Any, folder: Path, earlier: Mapping[str, Step]) -> Any:
    if isinstance(value, Mapping) and "step" in value:
        if value["step"] not in earlier:
            raise ValueError(f"a step names {value['step']!r}, which no earlier step is called")
        return earlier[value["step"]]
    if isinstance(value, Mapping) and "handle" in value:
        return Handle(value["handle"])
    if isinstance(value, str) and not value.startswith("handle:"):
        return operand(str(folder / value), None)
    return Handle(value.removeprefix("handle:")) if isinstance(value, str) else value
