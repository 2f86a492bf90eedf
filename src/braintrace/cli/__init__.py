"""The ``braintrace`` command."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..errors import CreditWarning, is_explained, printable

NETWORKS = ('alif', 'attention', 'gif', 'gru', 'lstm', 'rnn', 'ssm')
TASKS = (
    'evidence',
    'matching',
    'copying',
    'adding',
    'pattern',
    'mackey_glass',
    'lorenz',
    'henon',
    'digits',
    'randman',
    'shd',
    'nmnist',
)
"""Names for the help, which is printed without loading JAX."""

_EXAMPLES = """examples:
  braintrace train evidence                              train, results in out/evidence
  braintrace train copying --rule pp_prop --updates 300  another task, another rule
  braintrace train --resume out/evidence --updates 400   go on
  braintrace explain 'brainstate.nn:GRUCell(3, 16)' --input 8,3 --html report.html
  braintrace check mymodels.py:make --rules d_rtrl,pp_prop,eprop
  braintrace compare copying --rules d_rtrl,pp_prop,bptt --seeds 3
  braintrace bench mymodels.py:make

A model is given as module:name or file.py:name. What the name stands for is called
(with literal arguments, if there are any in brackets; train and compare put the numbers
of inputs and outputs before them) and returns a model, or for explain, check and bench
a model and example inputs of one step."""

USAGE, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes besides 0: what was asked cannot work, and the message says why; a check
failed; Ctrl-C."""


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(',') if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f'{text!r} has no names such as a,b,c')
    return names


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition('=')
    if not equals:
        raise argparse.ArgumentTypeError(f'{text!r} is not of the form name=value')
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _shape(text: str) -> tuple[int, ...]:
    numbers = [n.strip() for n in text.split(',') if n.strip()]
    if not all(n.isdecimal() for n in numbers):
        raise argparse.ArgumentTypeError(f'{text!r} is not a shape such as 8,3')
    return tuple(map(int, numbers))


def _whole(text: str, least: int = 0) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(
            f'{text!r} is not a whole number of at least {least}'
        )
    if number >= 2**32:
        raise argparse.ArgumentTypeError(f'{text!r} is not below {2**32}')
    return number


def _at_least_one(text: str) -> int:
    return _whole(text, 1)


def _rate(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f'{text!r} is not a number above 0')
    return number


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    main = argparse.ArgumentParser(
        'braintrace',
        description='Online learning for recurrent and spiking networks.',
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    main.add_argument(
        '--version', action='version', version=f'braintrace {__version__}'
    )
    commands = main.add_subparsers(dest='command', metavar='COMMAND')

    def command(name: str, run: str, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        made.add_argument(
            '--json',
            action='store_true',
            help='print the result as JSON; progress goes to stderr',
        )
        made.add_argument(
            '--seed',
            type=_whole,
            default=0,
            help='seed of weights and data (default 0)',
        )
        return made

    def time_step(made: argparse.ArgumentParser) -> None:
        made.add_argument(
            '--dt',
            metavar='TIME',
            help="time step of a model that reads brainstate's dt, e.g. 1.0 or 0.1ms",
        )

    def training(made: argparse.ArgumentParser) -> None:
        time_step(made)
        made.add_argument(
            '--model',
            help=f'{", ".join(NETWORKS)}, or file.py:factory of inputs and outputs',
        )
        made.add_argument('--units', type=_at_least_one, help='units of the network')
        made.add_argument(
            '--updates',
            '--epochs',
            type=_at_least_one,
            help='number of updates of the weights; each uses one batch',
        )
        made.add_argument(
            '--batch', type=_at_least_one, help='number of trials in a batch'
        )
        made.add_argument('--lr', type=_rate, help='learning rate of Adam')
        for flag in ('--task-option', '--rule-option'):
            made.add_argument(
                flag, type=_option, action='append', default=[], metavar='NAME=VALUE'
            )
        made.add_argument(
            '--out', help='folder for results (default: a new one in out/)'
        )

    train = command(
        'train',
        'runs.train',
        'train a network on a task; writes metrics, checkpoints, pictures, report',
    )
    train.add_argument('task', nargs='?', help=', '.join(TASKS))
    train.add_argument(
        '--rule', default=None, help='d_rtrl (default), pp_prop, eprop, ..., bptt'
    )
    train.add_argument('--resume', metavar='DIR', help='continue the training in DIR')
    train.add_argument(
        '--trust',
        action='store_true',
        help='with --resume: run the model file that DIR names without asking',
    )
    train.add_argument(
        '--save-every',
        type=_at_least_one,
        metavar='N',
        help='updates between checkpoints (default 25)',
    )
    train.add_argument(
        '--cores',
        type=_at_least_one,
        metavar='N',
        help='split the samples of a batch over N cores of this machine',
    )
    train.add_argument(
        '--coordinator',
        metavar='HOST:PORT',
        help='address of process 0, if there are several processes',
    )
    train.add_argument(
        '--processes',
        type=_at_least_one,
        metavar='N',
        help='number of processes',
    )
    train.add_argument(
        '--process',
        type=_whole,
        metavar='I',
        help='number of this process, counted from 0',
    )
    train.add_argument(
        '--certificate-every',
        type=_at_least_one,
        metavar='N',
        help='every N updates, measure whether the gradient points downhill',
    )
    training(train)
    train.set_defaults(seed=None)  # a resumed training has one

    compare = command(
        'compare',
        'runs.compare',
        'train by several rules from the same seeds; one plot',
    )
    compare.add_argument('task', help=', '.join(TASKS))
    compare.add_argument(
        '--rules',
        type=_names,
        default=['d_rtrl', 'pp_prop', 'bptt'],
        help='names of rules: a,b,c',
    )
    compare.add_argument(
        '--seeds',
        type=_at_least_one,
        default=1,
        help='number of seeds, counted from --seed',
    )
    training(compare)

    def model(made: argparse.ArgumentParser) -> None:
        time_step(made)
        made.add_argument(
            'model',
            help='the model, as module:factory or file.py:factory',
        )
        made.add_argument(
            '--input',
            type=_shape,
            action='append',
            default=[],
            help='shape of an input, e.g. 8,3',
        )
        made.add_argument(
            '--batch',
            type=_at_least_one,
            help='batch size of the states (default: as the first input)',
        )
        made.add_argument(
            '--steps',
            type=_at_least_one,
            default=100,
            help='length of a sequence (default 100)',
        )

    explain = command(
        'explain',
        'look.explain',
        'compile a model and show groups, operations, credit, cuts, memory',
    )
    model(explain)
    explain.add_argument('--rule', default='d_rtrl')
    explain.add_argument('--html', metavar='FILE', help='write the report as a page')

    check = command(
        'check', 'look.check', 'compare the gradients of rules with BPTT on a model'
    )
    model(check)
    check.add_argument(
        '--rules',
        type=_names,
        default=['d_rtrl', 'pp_prop', 'eprop'],
        help='names of rules: a,b,c',
    )
    check.add_argument('--plot', metavar='FILE', help='draw the comparison')

    bench = command(
        'bench',
        'look.bench',
        'time rules on a model beside BPTT and the forward pass',
    )
    model(bench)
    bench.add_argument(
        '--rules',
        type=_names,
        default=['d_rtrl', 'pp_prop'],
        help='names of rules: a,b,c',
    )
    bench.add_argument(
        '--rounds',
        type=_at_least_one,
        default=5,
        help='rounds of measuring (default 5)',
    )
    return main


def _run(options: argparse.Namespace) -> Any:
    """What the function of a command gives; warnings about credit are notices."""
    from . import look  # loads JAX, which the help does not need

    file, _, name = options.run.partition('.')
    run = getattr(importlib.import_module(f'.{file}', __name__), name)
    with warnings.catch_warnings():
        warnings.simplefilter('always', CreditWarning)
        shown: Any = warnings.showwarning

        def show(
            message: Any, category: type[Warning], *place: Any, **more: Any
        ) -> None:
            if not issubclass(category, CreditWarning):
                shown(message, category, *place, **more)
                return
            text = printable(f'notice: {message}', keep='\n')
            print(text, file=sys.stderr, flush=True)

        warnings.showwarning = show
        with look.time_step(options.dt):
            return run(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    options = parser().parse_args(arguments)
    if options.command is None:
        parser().print_help(sys.stderr)
        return USAGE
    try:
        result, text, code = _run(options)
    except Exception as error:
        if not is_explained(error):
            raise
        print(
            printable(f'braintrace {options.command}: {error}', keep='\n'),
            file=sys.stderr,
        )
        if options.command == 'train':
            from . import processes

            processes.leave(FAILED)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    print(json.dumps(result, indent=1) if options.json else printable(text, keep='\n'))
    return code
