"""The two tasks of the e-prop paper in NumPy: data, network, published gradients, losses.

Regression (a sum of sines) and classification (evidence accumulation) of Bellec et al. 2020, as NEST's
``eprop_*_bsshslm_2020`` models run them. Nothing of the library is used. Arrays are (from, to); t steps, b samples.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Task:
    """Numbers of one task; times are in steps of 1 ms."""

    inputs: int
    outputs: int
    steps: int
    window: int
    tau_v: float
    tau_out: float
    threshold: float
    gain_is_leak: bool
    refractory: int = 0
    adaptive_from: int = 100
    tau_a: float = 2000.0
    units: int = 100
    penalty: float = 300.0
    target_rate: float = 0.01

    @property
    def alpha(self):
        return np.exp(-1 / self.tau_v)

    @property
    def kappa(self):
        return np.exp(-1 / self.tau_out)

    @property
    def rho(self):
        return np.exp(-1 / self.tau_a)

    @property
    def gain(self):
        return 1 - self.alpha if self.gain_is_leak else 1.0

    @property
    def beta(self):
        """β of every unit; those that do not adapt have 0."""
        strength = 1.7 * (1 - self.rho) / (1 - self.alpha)
        return strength * (np.arange(self.units) >= self.adaptive_from)


REGRESSION = Task(100, 1, 1000, 1000, 30.0, 30.0, 0.03, gain_is_leak=True)
CLASSIFICATION = Task(
    40,
    2,
    2250,
    150,
    20.0,
    20.0,
    0.6,
    gain_is_leak=False,
    refractory=5,
    adaptive_from=50,
)

LOSSES = {
    'regression': [101.964363, 103.466736, 103.340607, 103.680244, 104.412781],
    'classification': [
        0.741152525,
        0.740388215,
        0.665785134,
        0.663644135,
        0.729429066,
    ],
}
"""Losses of the first five iterations, batch 1, as published: in single precision."""

DOUBLE = {
    'regression': [
        101.964356999042,
        103.466731126206,
        103.340607074772,
        103.680244037686,
        104.412775748752,
    ],
    'classification': [
        0.741152550006191,
        0.740388187700744,
        0.665785233177767,
        0.663644193322989,
        0.729428962844947,
    ],
}
"""The same by NEST 3.10, in double precision (``make nest``)."""


# ---------------------------------------------------------------- weights and data


@dataclass
class Drawn:
    """Weights at the start, the feedback, and a function that draws (inputs, targets) of an iteration."""

    w_in: np.ndarray
    w_rec: np.ndarray
    w_out: np.ndarray
    feedback: np.ndarray
    batch: object


def drawn(name, batch=1):
    """Everything random of a task, from NumPy's legacy generator with seed 1."""
    random = np.random.RandomState(1)
    task = REGRESSION if name == 'regression' else CLASSIFICATION
    n = task.units
    single = lambda x: x.astype(np.float32)
    w_in = single(random.randn(task.inputs, n) / np.sqrt(task.inputs))
    w_rec = single(random.randn(n, n) / np.sqrt(n))
    np.fill_diagonal(w_rec, 0.0)
    if name == 'regression':
        w_out = single(random.randn(n, task.outputs) / np.sqrt(n))
        feedback = single(random.randn(n, task.outputs) / np.sqrt(n))
        data = _sines(random, task)
        return Drawn(w_in, w_rec, w_out, feedback, lambda: data)
    limit = np.sqrt(3.0 / 51)
    w_out = single(random.uniform(-limit, limit, (n, task.outputs)))
    feedback = single(random.randn(n, task.outputs))
    draw = lambda: _evidence(random, task, batch)
    return Drawn(w_in, w_rec, w_out, feedback, draw)


def _sines(random, task):
    spikes = random.rand(task.steps, task.inputs) < 0.05
    spikes[0] = False
    amplitudes = random.uniform(0.5, 2.0, 4)
    phases = random.uniform(0.0, 2 * np.pi, 4)
    target = np.zeros(task.steps)
    for amplitude, phase, period in zip(
        amplitudes, phases, (1000, 500, 333, 200), strict=True
    ):
        turns = task.steps // period
        angle = np.linspace(0.0, 2 * np.pi * turns, task.steps)
        target += amplitude * np.sin(angle + phase)
    target -= target[0]
    target /= np.max(np.abs(target))
    return spikes[:, None].astype(float), target[:, None, None]


def _evidence(random, task, batch):
    """Inputs (t, b, i), and the right answer (b,)."""
    side = random.choice([0, 1], batch)
    odds = np.array([[0.3, 0.7], [0.7, 0.3]], np.float32)[side]
    odds = odds / odds.sum(-1, keepdims=True)
    cues = np.zeros((batch, 7), int)
    for b in range(batch):
        cues[b] = random.choice([0, 1], 7, p=odds[b])
    rates = np.zeros((batch, task.steps, task.inputs))
    for b in range(batch):
        for k, cue in enumerate(cues[b]):
            start = 150 * k + 50
            rates[b, start : start + 100, 10 * cue : 10 * cue + 10] = 0.04
    rates[:, -150:, 20:30] = 0.04
    rates[:, :, 30:40] = 0.01
    spikes = random.rand(batch, task.steps, task.inputs) < rates
    spikes[:, 0] = False
    answer = (cues.sum(1) > 3).astype(int)
    return spikes.transpose(1, 0, 2).astype(float), answer


# ---------------------------------------------------------------- one iteration


def run(task, weights, xs):
    """Spikes (t, b, h), pseudo-derivatives and outputs of a sequence that starts at zero."""
    w_in, w_rec, w_out = weights
    shape = (xs.shape[1], task.units)
    v, a, z, rest = (np.zeros(shape) for _ in range(4))
    y = np.zeros((xs.shape[1], task.outputs))
    spikes, slopes, outputs = [], [], []
    for x in xs:
        rest = np.maximum(rest - 1, 0)
        drive = x @ w_in + z @ w_rec
        v = task.alpha * v + task.gain * drive - task.threshold * z
        a = task.rho * a + z
        over = v - (task.threshold + task.beta * a)
        free = rest == 0
        z = ((over >= 0) & free).astype(float)
        rest = np.where(z > 0, task.refractory, rest)
        triangle = np.maximum(0, 1 - np.abs(over) / task.threshold)
        y = task.kappa * y + (1 - task.kappa) * z @ w_out
        spikes.append(z)
        slopes.append(0.3 / task.threshold * triangle * free)
        outputs.append(y)
    return np.stack(spikes), np.stack(slopes), np.stack(outputs)


def gradients(task, xs, spikes, slopes, errors, back):
    """The published gradients (input, recurrent, output weights) for errors (t, b, o), summed over time and samples.

    ``back`` (h, o): the weights by which errors come back.
    """
    steps, batch, units = spikes.shape
    low = 1 - task.kappa
    rate = spikes.sum(0) / steps
    penalty = task.penalty * (rate - task.target_rate) / steps
    before = np.concatenate([np.zeros_like(spikes[:1]), spikes[:-1]])
    sources = np.concatenate([xs, before], axis=2)
    total = np.zeros((sources.shape[2], units))
    out = np.zeros((units, task.outputs))
    for b in range(batch):
        presynaptic = np.zeros(sources.shape[2])
        adapting = np.zeros((sources.shape[2], units))
        filtered = np.zeros_like(adapting)
        summed = np.zeros_like(adapting)
        low_spikes = np.zeros(units)
        signals = errors[:, b] @ back.T
        for t in range(steps):
            presynaptic = task.alpha * presynaptic + task.gain * sources[t, b]
            e = slopes[t, b] * (presynaptic[:, None] - task.beta * adapting)
            adapting = task.rho * adapting + e
            filtered = task.kappa * filtered + low * e
            low_spikes = task.kappa * low_spikes + low * spikes[t, b]
            total += signals[t] * filtered
            summed += e
            out += np.outer(low_spikes, errors[t, b])
        total += penalty[b] * summed
    w_in, w_rec = total[: xs.shape[2]], total[xs.shape[2] :].copy()
    np.fill_diagonal(w_rec, 0.0)
    return w_in, w_rec, out


def regression(iterations):
    """Losses of the regression task."""
    task, start = REGRESSION, drawn('regression')
    weights = [w.astype(float) for w in (start.w_in, start.w_rec, start.w_out)]
    losses = []
    for _ in range(iterations):
        xs, targets = start.batch()
        spikes, slopes, outputs = run(task, weights, xs)
        errors = outputs - targets
        losses.append(0.5 * np.sum(errors**2))
        found = gradients(task, xs, spikes, slopes, errors, start.feedback)
        weights = [w - 1e-4 * g for w, g in zip(weights, found, strict=True)]
    return losses


def classification(iterations, batch=1):
    """Losses of the classification task."""
    task, start = CLASSIFICATION, drawn('classification', batch)
    weights = [w.astype(float) for w in (start.w_in, start.w_rec, start.w_out)]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    losses = []
    for n in range(1, iterations + 1):
        xs, answer = start.batch()
        spikes, slopes, outputs = run(task, weights, xs)
        scores = np.exp(outputs - outputs.max(-1, keepdims=True))
        chances = scores / scores.sum(-1, keepdims=True)
        inside = np.arange(task.steps) >= task.steps - task.window
        wanted = np.eye(task.outputs)[answer]
        errors = (chances - wanted) * inside[:, None, None]
        right = np.sum(chances * wanted, -1)[inside]
        losses.append(-np.mean(np.log(right)))
        found = gradients(task, xs, spikes, slopes, errors, start.feedback)
        rate = 5e-3 * np.sqrt(1 - 0.999**n) / (1 - 0.9**n)
        for k, g in enumerate(found):
            g = g / (task.window * batch)
            m, s = moments[k]
            m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g**2
            moments[k] = m, s
            weights[k] = weights[k] - rate * m / (np.sqrt(s) + 1e-8)
    return losses
