"""Small modules around each pattern that capture rewrites, with one more operator inserted at a random place. A module is captured at small values. Its
programs are then compared with autograd at other weights and batches, small and saturating ones, with rows that are masked whole."""
import copy
import math
import random

import torch
from torch import nn
from torch.nn import functional

from twobp.capture import capture, interpret
from twobp.capture.verify.reference import reference

BATCH, POSITIONS, OUT = 2, 8, 4  # a loss over a power of two numbers, so that its weight is exact
MAGNITUDES = {torch.float64: (1.0, 2.5, 8.0), torch.float32: (1.0, 2.5)}  # of weights and inputs, beside 0.1 at capture
NUDGES = 6
ROUNDING = {torch.float64: (1e-15, 1e-9), torch.float32: (1e-6, 2e-5)}  # the relative size of a nudge, and an error that is always allowed


def allowed(dtype, magnitude):
    """The error that scores of this size always allow: they grow with the sixth power of the magnitude, and weights with their rounding."""
    return ROUNDING[dtype][1] * max(1.0, magnitude ** 6 / 30)


def least(x):
    return torch.finfo(x.dtype).min


# Each takes a tensor and gives one of its shape and dtype. Many do nothing at small values.
INSERTED = {
    "clamp": lambda x, part: x.clamp(-3, 3),
    "clamp in place": lambda x, part: x.clone().clamp_(-3, 3),
    "hardtanh": lambda x, part: functional.hardtanh(x, -2.5, 2.5),
    "minimum": lambda x, part: torch.minimum(x, x.new_full((), 3.0)),
    "maximum": lambda x, part: torch.maximum(x, x.new_full((), -3.0)),
    "threshold": lambda x, part: functional.threshold(x, -3.0, -3.0),
    "where": lambda x, part: torch.where(x < 3, x, 3.0),
    "where of constants": lambda x, part: torch.where(part.ones > 0, x, 0.0),
    "masked_fill": lambda x, part: x.masked_fill(x > 3, 3.0),
    "detach": lambda x, part: x.detach(),
    "half detached": lambda x, part: 0.5 * x + 0.5 * x.detach(),
    "dropout": lambda x, part: functional.dropout(x, 0.3, part.training),
    "unread dropout": lambda x, part: (functional.dropout(x, 0.3, part.training), x)[1],
    "add": lambda x, part: x + 0.01,
    "add of itself": lambda x, part: x + x * 0.5,
    "add of a parameter": lambda x, part: x + part.bias,
    "add of a field": lambda x, part: x + part.field,
    "mul": lambda x, part: x * 1.5,
    "mul by ones": lambda x, part: x * part.ones,
    "mul by a parameter": lambda x, part: x * part.gain,
    "mul by a field": lambda x, part: x * (1 + part.field),
    "square": lambda x, part: x + 1e-9 * x ** 3,
    "cast": lambda x, part: x.to(torch.bfloat16).to(x.dtype),
    "cast to float32": lambda x, part: x.float().to(x.dtype),
    "round": lambda x, part: (x * 64).round() / 64,
    "round with a gradient": lambda x, part: x + ((x * 64).round() / 64 - x).detach(),
    "norm": lambda x, part: x / x.norm(dim=-1, keepdim=True).clamp(min=4.0),
    "softcap": lambda x, part: 5 * torch.tanh(x / 5),
    "nan_to_num": lambda x, part: torch.nan_to_num(x),
    "clone": lambda x, part: x.clone(),
    "flip": lambda x, part: x.flip(-1),
    "roll": lambda x, part: x.roll(1, -1),
    "permutation": lambda x, part: x.index_select(-1, torch.arange(x.shape[-1] - 1, -1, -1)),
    "layout": lambda x, part: x.transpose(-1, -2).contiguous().transpose(-1, -2),
}


class Part(nn.Module):
    """A pattern. Its forward calls at(x) wherever an operator may be inserted; the operator of this `name` is, at the call number `place`."""

    def __init__(self, dice):
        super().__init__()
        self.dim, self.place, self.name, self.calls = 0, -1, "", 0
        self.gain, self.bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.register_buffer("ones", torch.ones(()))
        self.field = None

    def at(self, x):
        self.calls += 1
        return INSERTED[self.name](x, self) if self.calls == self.place else x

    def forward(self, x, keep):
        self.calls, self.field = 0, keep.to(x.dtype).sum() * 0.01
        return self.compute(x, keep) + 0 * (self.gain + self.bias)


def rotate_half(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-b, a], -1) * torch.cat([sin, sin], -1)


def rotate_parts(x, cos, sin):
    a, b = x[..., :x.shape[-1] // 2], x[..., x.shape[-1] // 2:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(Part):
    """Attention of one or three projections, with or without rotary embedding, a norm of each head, and masks of all kinds."""
    roundings = None  # of the gradient dp of the probabilities

    def __init__(self, dice):
        super().__init__(dice)
        self.heads, self.width = dice.choice([1, 2, 4]), dice.choice([2, 4, 8])
        self.kv_heads = dice.choice([one for one in (1, 2, 4) if self.heads % one == 0])
        self.rows = [self.heads * self.width, self.kv_heads * self.width, self.kv_heads * self.width]
        self.dim, self.one = self.heads * self.width, dice.random() < 0.5
        bias = dice.random() < 0.5
        self.projections = nn.ModuleList([nn.Linear(self.dim, n, bias=bias) for n in ([sum(self.rows)] if self.one else self.rows)])
        self.rotation = dice.choice([None, rotate_half, rotate_parts])
        self.norm = nn.RMSNorm(self.width) if dice.random() < 0.2 else None
        self.form = dice.choice(["fused causal", "fused", "fused bool", "filled", "filled before", "added", "added constant", "dropped"])
        self.fill = dice.choice([None, None, -1e9, -1e30, -1e4, -math.inf])
        self.causal, self.padded = dice.random() < 0.7, dice.random() < 0.6
        self.expands, self.swapped = dice.random() < 0.5, dice.random() < 0.5
        self.scale = dice.choice([None, None, 0.3])
        angle = torch.outer(torch.arange(POSITIONS, dtype=torch.float64), 100.0 ** (-torch.arange(0, self.width, 2, dtype=torch.float64) / self.width))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def shared(self, x):
        times = self.heads // self.kv_heads
        if self.expands:
            return x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
        return x.repeat_interleave(times, 1)

    def hidden(self, keep):
        """Returns which keys a query does not see."""
        hidden = torch.zeros(1, 1, POSITIONS, POSITIONS, dtype=torch.bool)
        if self.causal:
            hidden = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(1)[None, None]
        return hidden | (keep[:, None, None] == 0) if self.padded else hidden

    def compute(self, x, keep):
        parts = self.projections[0](self.at(x)).split(self.rows, -1) if self.one else [self.at(one(x)) for one in self.projections]
        q, k, v = (self.at(self.at(one).unflatten(-1, (-1, self.width)).transpose(1, 2)) for one in parts)
        if self.norm is not None:
            q, k = self.at(self.norm(q)), self.at(self.norm(k))
        if self.rotation is not None:
            q, k = (self.at(self.rotation(self.at(one), self.at(self.cos), self.sin)) for one in (q, k))
        return self.at(self.at(self.attend(q, self.at(self.shared(k)), self.at(self.shared(v)), keep)).transpose(1, 2).reshape(*x.shape[:2], self.dim))

    def attend(self, q, k, v, keep):
        scale = self.scale or self.width ** -0.5
        if self.form.startswith("fused") or self.form == "dropped":
            options = {"scale": self.scale, "dropout_p": 0.2 if self.form == "dropped" and self.training else 0.0}
            if self.form == "fused causal":
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
            mask = None if self.form == "fused" else ~self.hidden(keep)
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
        fill, hidden = least(q) if self.fill is None else self.fill, self.hidden(keep)
        scores = self.at(self.at(q) @ self.at(k.transpose(-1, -2)))
        if self.form == "filled before":
            scores = self.at(scores.masked_fill(hidden, fill)) * scale
        else:
            scores = self.at(scores * scale)
            if self.form == "filled":
                scores = torch.where(hidden, fill, scores) if self.swapped else scores.masked_fill(hidden, fill)
            elif self.form == "added constant":
                scores = scores + self.at(torch.zeros_like(scores[:1, :1]).masked_fill(torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(1), fill))
            else:
                scores = scores + self.at(torch.zeros((), dtype=q.dtype).masked_fill(hidden, fill))
        scores = self.at(scores)
        probabilities = scores.softmax(-1)
        out = self.at(probabilities) @ v
        if self.roundings is not None and out.requires_grad and scores.requires_grad:
            size = []  # of the products that dp is a sum of
            out.register_hook(lambda dout: size.append(dout.abs() @ v.detach().abs().transpose(-1, -2)))
            scores.register_hook(lambda ds: ds + self.roundings[:, :ds.shape[1]] * probabilities.detach() * size[0])
        return self.at(out)


class Activation(Part):
    """A spelled-out GELU or SiLU."""
    WAYS = [lambda x, at: at(0.5 * x) * at(1 + at(torch.tanh(at(math.sqrt(2 / math.pi) * at(x + 0.044715 * at(x ** 3)))))),
            lambda x, at: at(x * 0.5) * at(1.0 + at(torch.erf(at(x / math.sqrt(2))))),
            lambda x, at: x * at(torch.sigmoid(at(x))),
            lambda x, at: x / at(1 + at(torch.exp(at(-x))))]

    def __init__(self, dice):
        super().__init__(dice)
        self.dim, self.way = 8, dice.choice(self.WAYS)

    def compute(self, x, keep):
        return self.at(self.way(self.at(x), self.at))


class Norm(Part):
    """A spelled-out RMSNorm or LayerNorm."""
    WAYS = [lambda x, gain, bias, at: at(gain) * at(x * at(torch.rsqrt(at(at(x.pow(2)).mean(-1, keepdim=True)) + 1e-6))),
            lambda x, gain, bias, at: at(x / at(torch.sqrt(at(at(x * x).mean(-1, keepdim=True) + 1e-6)))) * gain + bias,
            lambda x, gain, bias, at: at(at(x - at(x.mean(-1, keepdim=True))) / at(torch.sqrt(at(x.var(-1, keepdim=True, unbiased=False) + 1e-5)))) * gain + at(bias)]

    def __init__(self, dice):
        super().__init__(dice)
        self.dim, self.way = 8, dice.choice(self.WAYS)
        self.weights, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def compute(self, x, keep):
        return self.at(self.way(self.at(x), self.weights, self.shift, self.at))


class Gate(Part):
    """activation(g) * u of two projections, halves or other parts of one."""

    def __init__(self, dice):
        super().__init__(dice)
        self.dim, self.form = 8, dice.choice(["two", "chunk", "slices", "steps", "swapped"])
        self.inner = nn.ModuleList([nn.Linear(8, 6), nn.Linear(8, 6)] if self.form == "two" else [nn.Linear(8, 12)])
        self.outer = nn.Linear(6, 8)
        self.act = dice.choice([functional.silu, functional.gelu, lambda x: functional.gelu(x, approximate="tanh"), lambda x: x * torch.sigmoid(x)])

    def compute(self, x, keep):
        if self.form == "two":
            g, u = (self.at(one(self.at(x))) for one in self.inner)
        else:
            both = self.at(self.inner[0](x))
            g, u = {"chunk": lambda: both.chunk(2, -1), "slices": lambda: (both[..., :6], both[..., 6:]), "steps": lambda: (both[..., ::2], both[..., 1::2]),
                    "swapped": lambda: both.chunk(2, -1)[::-1]}[self.form]()
        return self.outer(self.at(self.at(self.act(self.at(g))) * self.at(u)))


class Shared(Part):
    """Projections that share inputs, some of them of each other's results."""

    def __init__(self, dice):
        super().__init__(dice)
        self.dim = 8
        bias = dice.random() < 0.5
        self.a, self.b = nn.Linear(8, 4, bias=bias), nn.Linear(8, 4, bias=bias)
        self.inner = nn.ModuleList([nn.Linear(4, 8, bias=dice.random() < 0.5) for _ in range(4)])
        self.vector = nn.Parameter(torch.randn(4)) if dice.random() < 0.3 else None

    def compute(self, x, keep):
        a, c = self.at(self.a(x)), self.at(self.b(self.at(x)))
        y = torch.tanh(self.at(self.inner[0](a))) * self.at(self.inner[1](a)) + self.at(self.inner[2](c)) * torch.sigmoid(self.inner[3](self.at(c)))
        return self.at(y) if self.vector is None else self.at(y) * functional.linear(a, self.vector)[..., None]


class Model(nn.Module):
    """A pattern within a model: its input is not a field of the batch."""

    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.out = nn.Linear(part.dim, part.dim), part, nn.Linear(part.dim, OUT)

    def forward(self, x, keep):
        return self.out(self.part(self.first(x), keep))


PATTERNS = [Attention, Attention, Attention, Attention, Activation, Norm, Gate, Shared]


def loss_fn(output, batch):
    return functional.mse_loss(output, batch["wanted"])


def batch_of(dim, dtype, magnitude, whole):
    """A batch. If not `whole`, the second sample is padded on the left, so that causal rows are masked whole, or on the right."""
    keep = torch.ones(BATCH, POSITIONS, dtype=torch.int64)
    if not whole:
        keep[1, :3] = 0 if torch.rand(()) < 0.7 else 1
        keep[1, 3:] = 1 - keep[1, 0]
    return {"x": magnitude * torch.randn(BATCH, POSITIONS, dim, dtype=dtype), "keep": keep, "wanted": torch.randn(BATCH, POSITIONS, OUT, dtype=dtype)}


def case(seed, number):
    """Returns a model, its dtype, and what it is."""
    dice = random.Random(f"{seed} {number}")
    torch.manual_seed(dice.randrange(2 ** 31))
    dtype = torch.float64 if dice.random() < 0.7 else torch.float32
    model = Model(dice.choice(PATTERNS)(dice)).to(dtype)
    part = model.part
    with torch.no_grad():
        model(**{name: one for name, one in batch_of(part.dim, dtype, 1, True).items() if name != "wanted"})
    part.name, part.place = dice.choice(list(INSERTED)), dice.randint(1, part.calls)
    settings = {name: value for name, value in vars(part).items() if isinstance(value, (str, int, float, bool)) and name not in ("training", "calls")}
    return model, dtype, f"{type(part).__name__} in {dtype}, {settings}"


def scale(model, magnitude):
    """Draws other weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(magnitude * torch.randn_like(parameter) / math.sqrt(parameter.shape[-1] if parameter.dim() else 1))


class Comparison:
    """The programs and the module under autograd, with the same random numbers. Each gives losses in training and evaluation, and gradients, by name."""

    def __init__(self, captured, fields):
        self.captured, self.fields = captured, fields
        chain, training, evaluation = captured._chain(), interpret.Random(7), interpret.Random(7)
        count = chain.count(fields)
        weight = torch.tensor(1 / count, dtype=torch.float32).item()  # as the runtime has it
        with torch.no_grad():
            loss, slots, _ = chain.forward(fields, weight, training)
            self.drawn = [list(training.drawn), None]
            gradients = chain.backward(slots, training)
            evaluated, *_ = chain.forward(fields, weight, evaluation, evaluate=True)
        self.drawn[1] = list(evaluation.drawn)
        self.programs = {name: one.double() / (weight * count) for name, one in {"loss": loss, "evaluation": evaluated, **gradients}.items()}

    def module(self):
        loss, gradients, _, evaluated, *_ = reference(self.captured, self.fields, *map(list, self.drawn))
        return {name: one.double() for name, one in {"loss": loss, "evaluation": evaluated, **gradients}.items()}

    def nudged(self):
        """What the module itself gives for weights that differ by a rounding. Attention computes p (dp - dout out), and of saturated rows
        only roundings are left: in fused attention, PyTorch's as well as ours, dp and dout out are not rounded alike."""
        rounding, parameters = ROUNDING[self.fields["x"].dtype][0], list(self.captured.parameters.values())
        kept = [p.detach().clone() for p in parameters]
        part, results = self.captured.module.part, []
        for i in range(NUDGES + 1):
            with torch.no_grad():
                for p, one in zip(parameters, kept):
                    p.copy_(one * (1 + rounding * torch.randn_like(one)) if i < NUDGES else one)
            part.roundings = rounding * torch.randn(BATCH, 4, POSITIONS, POSITIONS, dtype=kept[0].dtype) if i < NUDGES else None
            results.append(self.module())
        return results[:-1]


def differences(captured, fields, magnitude=1.0):
    """Returns sentences about what differs by more than rounding."""
    both = Comparison(captured, fields)
    wanted, nudged, wrong = both.module(), None, []
    largest = max(one.norm().item() for name, one in wanted.items() if name not in ("loss", "evaluation"))
    for name, one in wanted.items():
        if not torch.isfinite(wanted["loss"]) or not torch.isfinite(one).all():
            continue  # the module's own numbers tell nothing
        error = (both.programs.get(name, torch.zeros_like(one)) - one).norm().item()
        size = one.norm().item() if name in ("loss", "evaluation") else max(one.norm().item(), 1e-3 * largest)
        if error <= allowed(fields["x"].dtype, magnitude) * size:
            continue
        nudged = nudged or both.nudged()
        own = max((other[name] - one).norm().item() for other in nudged)
        if not error <= 30 * own:
            wrong.append(f"{name} is off by {error / max(size, 1e-300):.1e} of its size (by a rounding of the weights: {own / max(size, 1e-300):.1e})")
    return wrong


def run(seed, number):
    """Returns what the case is, and sentences about what is wrong."""
    model, dtype, what = case(seed, number)
    scale(model, 0.1)
    example = batch_of(model.part.dim, dtype, 0.1, True)
    if not torch.isfinite(loss_fn(model(example["x"], example["keep"]), example)):
        return what, []  # which capture refuses
    try:
        captured = capture(model, example, loss_fn=loss_fn, cache=False, slices=number % 4 == 0, check=number % 4 == 0)
    except Exception as error:
        return what, [f"capture raises {type(error).__name__}: {error}"]
    for magnitude in MAGNITUDES[dtype]:
        scale(model, magnitude)
        batch = batch_of(model.part.dim, dtype, magnitude, False)
        try:
            wrong = differences(captured, copy.copy(batch), magnitude)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            return what, [f"at magnitude {magnitude}: {one}" for one in wrong]
    return what, []
