"""The drawings of the docs: ``python scripts/pictures.py`` writes them to ``docs/pictures``."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent.parent / 'docs' / 'pictures'
TEAL, RED, GREY, BLUE, SAND, WHITE = (
    '#00796b',
    '#c62828',
    '#607d8b',
    '#e3f2fd',
    '#fff3e0',
    '#ffffff',
)


class Drawing:
    """Boxes, arrows and words, as SVG."""

    def __init__(self, width: int, height: int):
        self.size, self.parts = (width, height), []

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        text: str = '',
        fill: str = BLUE,
        line: str = GREY,
    ) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{fill}" stroke="{line}"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 5, text)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        fill: str = '#263238',
        size: int = 14,
        at: str = 'middle',
    ) -> None:
        shown = text.replace('&', '&amp;').replace('<', '&lt;')
        self.parts.append(
            f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}" text-anchor="{at}">{shown}</text>'
        )

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        color: str = GREY,
        cut: bool = False,
    ) -> None:
        dash = ' stroke-dasharray="5 4"' if cut else ''
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="2"{dash} '
            f'marker-end="url(#to{color[1:]})"/>'
        )
        if cut:
            self.text((x1 + x2) / 2, (y1 + y2) / 2 + 6, '✂', color, 18)

    def write(self, name: str) -> None:
        width, height = self.size
        heads = ''.join(
            f'<marker id="to{c[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{c}"/></marker>'
            for c in (TEAL, RED, GREY)
        )
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f'{name}.svg').write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
            f'<defs>{heads}</defs><rect width="{width}" height="{height}" rx="8" fill="{WHITE}"/>\n'
            + '\n'.join(self.parts)
            + '\n</svg>\n'
        )


def step() -> None:
    """One step as a graph: roles of what goes in and comes out."""
    d = Drawing(760, 300)
    for y, text in [
        (30, 'hidden states h(t-1)'),
        (100, 'parameters θ'),
        (170, 'inputs x(t)'),
        (240, 'other states'),
    ]:
        d.box(20, y, 170, 40, text, SAND if 'param' in text else BLUE)
        d.arrow(190, y + 20, 290, 150)
    d.box(290, 60, 180, 180, '', '#f5f5f5')
    for y, text in [
        (100, 'your update(),'),
        (122, 'traced to a'),
        (144, 'list of operations:'),
        (176, 'x @ w, tanh, +, …'),
    ]:
        d.text(380, y, text)
    for y, text in [
        (30, 'hidden states h(t)'),
        (100, 'outputs'),
        (170, 'loss ℓ(t)'),
        (240, 'other states'),
    ]:
        d.box(570, y, 170, 40, text)
        d.arrow(470, 150, 570, y + 20)
    d.write('step')


def groups() -> None:
    """Positions of a hidden group, what keeps them and what mixes them."""
    d = Drawing(760, 330)
    d.text(200, 28, 't-1')
    d.text(520, 28, 't')
    for i in range(3):
        y = 45 + 92 * i
        for x in (120, 440):
            d.box(x, y, 170, 66, '', '#fafafa')
            d.box(x + 12, y + 14, 68, 38, f'V{i + 1}')
            d.box(x + 92, y + 14, 68, 38, f'a{i + 1}')
        d.text(60, y + 38, f'neuron {i + 1}')
        d.arrow(292, y + 26, 438, y + 26, TEAL)
    d.arrow(292, 86, 438, 162, RED, cut=True)
    d.arrow(292, 178, 438, 258, RED, cut=True)
    d.text(630, 75, 'a position: (V, a)', size=13, at='start')
    d.text(630, 95, 'of one neuron', size=13, at='start')
    d.text(630, 165, 'kept: through', TEAL, 13, 'start')
    d.text(630, 185, 'its own states', TEAL, 13, 'start')
    d.text(630, 255, 'cut: from neuron', RED, 13, 'start')
    d.text(630, 275, 'to neuron', RED, 13, 'start')
    d.write('groups')


def time() -> None:
    """A trace is carried forward, BPTT comes back."""
    d = Drawing(760, 330)
    for row, (y, name) in enumerate([(60, 'BPTT'), (220, 'traces')]):
        d.text(50, y + 25, name, size=16)
        for i in range(5):
            x = 110 + 130 * i
            d.box(x, y, 70, 40, f'h({i + 1})')
            if i < 4:
                d.arrow(x + 70, y + 12, x + 130, y + 12)
                if row == 0:
                    d.arrow(x + 130, y + 30, x + 72, y + 30, RED)
                else:
                    d.arrow(x + 70, y + 72, x + 130, y + 72, TEAL)
            if row == 1:
                d.box(x, y + 54, 70, 36, f'ε({i + 1})', '#e0f2f1', TEAL)
    d.text(
        400,
        30,
        'forward through all steps, all states stored, then backward: memory grows with time',
        RED,
    )
    d.text(
        400,
        190,
        'a trace ε is carried beside the states: nothing is stored for a backward pass',
        TEAL,
    )
    d.write('time')


def credit() -> None:
    """Four parameters and their classes."""
    d = Drawing(760, 300)
    rows = [
        (
            'exact',
            'input weights of units that do not feed each other',
            'all paths kept',
            TEAL,
        ),
        (
            'local',
            'recurrent weights',
            'own unit kept, detours over other units cut',
            TEAL,
        ),
        (
            'instantaneous',
            'a weight whose every result reaches all units',
            'this step only',
            GREY,
        ),
        (
            'none',
            'a weight behind a comparison or a stop_gradient',
            'no derivative at all',
            RED,
        ),
    ]
    for i, (name, which, what, color) in enumerate(rows):
        y = 20 + 70 * i
        d.box(20, y, 130, 46, name, SAND)
        d.arrow(150, y + 23, 240, y + 23, color, cut=name == 'none')
        d.text(255, y + 18, which, at='start')
        d.text(255, y + 38, what, color, 13, 'start')
    d.write('credit')


def memory(steps: tuple[int, ...] = (50, 100, 200, 400, 800)) -> None:
    """Bytes over the length of a sequence, by ``learner.memory_plan``."""
    import brainstate
    import jax.numpy as jnp
    from matplotlib.figure import Figure

    import braintrace

    figure = Figure(figsize=(7.6, 3.4), layout='constrained')
    ax = figure.subplots()
    lines: dict[str, list[float]] = {}
    for rule in ('d_rtrl', 'pp_prop'):
        learner = braintrace.compile(
            brainstate.nn.GRUCell(16, 64), rule, jnp.zeros((8, 16)), batch_size=8
        )
        for t in steps:
            plan = learner.memory_plan(t)
            if rule == 'd_rtrl':
                lines.setdefault('BPTT', []).append(plan.bptt / 2**20)
            lines.setdefault(f'{rule}, traces carried', []).append(
                plan.one_pass / 2**20
            )
    for name, values in lines.items():
        ax.plot(steps, values, 'o-', label=name)
    ax.set(
        xlabel='steps',
        ylabel='MiB, as compiled',
        title='GRU, 64 units, 16 inputs, batch 8',
        ylim=0,
    )
    ax.grid(alpha=0.3)
    ax.legend()
    figure.savefig(FOLDER / 'memory.svg', metadata={'Date': None})
    print({name: [round(v, 1) for v in values] for name, values in lines.items()})


if __name__ == '__main__':
    for draw in (step, groups, time, credit, memory):
        draw()
