"""The drawings of the docs: ``python scripts/pictures.py`` writes them to ``docs/pictures``."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent.parent / 'docs' / 'pictures'
TEAL, RED, GREY, BLUE, SAND, WHITE = (
    '#00796b',
    '#c62828',
    '#546e7a',
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
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.2 * width:.0f}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
            f'<defs>{heads}</defs><rect width="{width}" height="{height}" rx="8" fill="{WHITE}"/>\n'
            + '\n'.join(self.parts)
            + '\n</svg>\n'
        )


def step() -> None:
    """One step as a graph: roles of what goes in and comes out."""
    d = Drawing(560, 250)
    for y, text in [
        (15, 'hidden states h(t-1)'),
        (75, 'parameters θ'),
        (135, 'inputs x(t)'),
        (195, 'other states'),
    ]:
        d.box(10, y, 150, 40, text, SAND if 'param' in text else BLUE)
        d.arrow(160, y + 20, 208, 85 + y / 3)
    d.box(210, 50, 140, 150, '', '#f5f5f5')
    for y, text in [
        (85, 'your update(),'),
        (107, 'traced to a'),
        (129, 'list of operations:'),
        (161, 'x @ w, tanh, +, …'),
    ]:
        d.text(280, y, text)
    for y, text in [
        (15, 'hidden states h(t)'),
        (75, 'outputs'),
        (135, 'loss ℓ(t)'),
        (195, 'other states'),
    ]:
        d.box(400, y, 150, 40, text)
        d.arrow(350, 85 + y / 3, 398, y + 20)
    d.write('step')


def groups() -> None:
    """Positions of a hidden group, what keeps them and what mixes them."""
    d = Drawing(560, 340)
    d.text(149, 24, 't-1')
    d.text(471, 24, 't')
    for i in range(3):
        y = 36 + 84 * i
        for x in (78, 400):
            d.box(x, y, 142, 62, '', '#fafafa')
            d.box(x + 10, y + 12, 56, 38, f'V{i + 1}')
            d.box(x + 76, y + 12, 56, 38, f'a{i + 1}')
        d.text(68, y + 36, f'neuron {i + 1}', at='end')
        d.arrow(222, y + 22, 398, y + 22, TEAL)
    for y in (80, 164):
        d.arrow(222, y, 398, y + 82, RED, cut=True)
    d.text(10, 312, 'A position: the states (V, a) of one neuron.', at='start')
    d.text(10, 332, 'Kept: through its own states.', TEAL, at='start')
    d.text(290, 332, 'Cut: from neuron to neuron.', RED, at='start')
    d.write('groups')


def time() -> None:
    """A trace is carried forward, BPTT comes back."""
    d = Drawing(560, 270)
    for row, (y, name) in enumerate([(50, 'BPTT'), (164, 'traces')]):
        d.text(10, y + 25, name, size=16, at='start')
        for i in range(5):
            x = 70 + 105 * i
            d.box(x, y, 60, 40, f'h({i + 1})')
            if i < 4:
                d.arrow(x + 60, y + 12, x + 104, y + 12)
                if row == 0:
                    d.arrow(x + 104, y + 30, x + 61, y + 30, RED)
                else:
                    d.arrow(x + 60, y + 72, x + 104, y + 72, TEAL)
            if row == 1:
                d.box(x, y + 54, 60, 36, f'ε({i + 1})', '#e0f2f1', TEAL)
    for y, text, color in [
        (18, 'Forward, all states stored, then backward:', RED),
        (38, 'memory grows with the length of the sequence.', RED),
        (132, 'A trace ε is carried beside the states:', TEAL),
        (152, 'nothing is stored for a backward pass.', TEAL),
    ]:
        d.text(70, y, text, color, 15, 'start')
    d.write('time')


def credit() -> None:
    """Four parameters and their classes."""
    d = Drawing(560, 270)
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
        y = 14 + 65 * i
        d.box(10, y, 116, 46, name, SAND)
        d.arrow(126, y + 23, 198, y + 23, color, cut=name == 'none')
        d.text(210, y + 19, which, at='start')
        d.text(210, y + 39, what, color, 14, 'start')
    d.write('credit')


def memory(steps: tuple[int, ...] = (50, 100, 200, 400, 800)) -> None:
    """Bytes over the length of a sequence, by ``learner.memory_plan``."""
    import brainstate
    import jax.numpy as jnp
    from matplotlib.figure import Figure

    import braintrace

    figure = Figure(figsize=(6.4, 3.4), layout='constrained')
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
