#!/usr/bin/env python3
"""Writes operator_calls.jsonl.gz, right calls of the operators that a bundle may call (twobp/graph/operators.cpp): what LibTorch calls
while the samples of its own test suite run forward and backward. operator_sweep.cpp changes these calls. Needs the package
expecttest. Run it when the list of operators or LibTorch changes."""
import gzip
import json
import pathlib
import re
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

HERE = pathlib.Path(__file__).parent
MOST = 4  # calls of an overload
MOST_ELEMENTS = 600
DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.int64: "int64",
          torch.int32: "int32", torch.int16: "int16", torch.int8: "int8", torch.uint8: "uint8", torch.bool: "bool"}
FORMATS = {torch.contiguous_format: "contiguous", torch.preserve_format: "preserve", torch.channels_last: "channels_last",
           torch.channels_last_3d: "channels_last_3d"}
aten = torch.ops.aten


def listed() -> set[str]:
    text = (HERE / "../../../twobp/graph/operators.cpp").read_text()
    text = re.sub(r"//.*", "", text[text.index("kAllowed[] = {"):])
    return set(re.findall(r'"(\w+)"', text[:text.index("};")]))


class Unknown(Exception):
    """A value that graph.json cannot contain."""


class Call:
    """One call as an instruction of graph.json, with its tensors."""

    def __init__(self, schema, args, kwargs):
        self.tensors, self.slots = [], {}
        values = list(args)
        for argument in schema.arguments[len(args):]:
            values.append(kwargs[argument.name] if argument.name in kwargs else argument.default_value)
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        returns = schema.returns
        self.text = {"op": name, "args": [self.argument(str(argument.type), value, argument.name) for argument, value in zip(schema.arguments, values)]}
        self.list = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
        self.tensor_returns = [str(one.type) == "Tensor" for one in returns]
        self.schema = schema

    def finish(self, result) -> dict:
        first = len(self.tensors)
        if self.list:
            out = [first + i for i in range(len(result))]
        else:
            out = [first + i if tensor else None for i, tensor in enumerate(self.tensor_returns)]
        return {**self.text, "out": out, **({"list": True} if self.list else {}), "tensors": self.tensors}

    def slot(self, tensor):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.dtype not in DTYPES \
                or (tensor.numel() > MOST_ELEMENTS and tensor.dtype != torch.uint8) or tensor.is_neg() \
                or tensor._is_zerotensor():
            raise Unknown
        if id(tensor) not in self.slots:
            self.slots[id(tensor)] = len(self.tensors)
            one = [DTYPES[tensor.dtype], list(tensor.shape), list(tensor.stride())]
            if not tensor.dtype.is_floating_point and tensor.numel() <= MOST_ELEMENTS:
                one.append(tensor.reshape(-1).int().tolist())
            elif tensor.dtype.is_floating_point and tensor.numel() and bool((tensor >= 0).all()):
                one.append("probabilities")
            self.tensors.append(one)
        return {"v": self.slots[id(tensor)]}

    def argument(self, kind, value, name=""):
        if "Generator" in kind:
            return {"random": 1}
        if name == "dtype" and type(value) is int:
            value = torch.int64  # the default of whole numbers
        if name == "memory_format" and type(value) is int:
            value = torch.contiguous_format
        if value is None:
            return None
        if kind == "Device":
            return {"device": 0}
        if isinstance(value, torch.Tensor):
            return self.slot(value)
        if isinstance(value, (list, tuple)):
            return [self.argument("", one) for one in value]
        if isinstance(value, torch.dtype):
            if value not in DTYPES:
                raise Unknown
            return {"dtype": DTYPES[value]}
        if isinstance(value, torch.memory_format):
            return {"memory_format": FORMATS[value]}
        if isinstance(value, float) and value != value or value in (float("inf"), float("-inf")):
            return {"float": str(value)}
        if kind in ("Tensor", "Optional[Tensor]") and isinstance(value, (int, float)):
            return {"number": value}
        if isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (torch.device, torch.layout)):
            return None
        raise Unknown


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.calls, self.kept = listed(), {}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        call = None
        # Random numbers must have a seed, so graph.json names the overloads that take a generator.
        seeded = torch.Tag.nondeterministic_seeded not in func.tags or any("Generator" in str(one.type) for one in func._schema.arguments)
        if name in self.names and not func._schema.is_mutable and (seeded or "attention" in name):
            try:
                call = Call(func._schema, args, kwargs)
            except Unknown:
                pass
        result = func(*args, **kwargs)
        if call is not None:
            self.keep(call.finish(result))
        return result

    def keep(self, call):
        """Keeps the calls that differ most: in the dimensions and dtypes of their tensors, and in which arguments are null."""
        if not factors_make_sizes(call):
            return
        kinds = json.dumps([[one[0], len(one[1])] for one in call["tensors"]] + [one is None for one in call["args"]])
        kept = self.calls.setdefault(call["op"], {})
        if kinds not in kept and len(kept) < MOST:
            kept[kinds] = call


def factors_make_sizes(call):
    """Samples of antialiased resizing have factors that no call of interpolate() gives with these sizes; programs with such are refused."""
    if "_aa_backward" not in call["op"]:
        return True
    made, sizes, factors = call["args"][1], call["args"][2][2:], call["args"][4:6]
    return all(factor is None or int(size * factor) == one for one, size, factor in zip(made, sizes, factors))


def backward(result):
    tensors = [one for one in torch.utils._pytree.tree_leaves(result) if isinstance(one, torch.Tensor) and one.requires_grad
               and one.dtype.is_floating_point]
    if tensors:
        torch.autograd.backward(tensors, [torch.ones_like(one) for one in tensors])


def run_samples(recorder):
    for op in op_db:
        for dtype in (torch.float32, torch.float64, torch.int64):
            grad = dtype.is_floating_point and op.supports_autograd
            try:
                samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad))
            except Exception:
                continue
            for sample in samples[:40 if dtype == torch.float32 else 4]:
                try:
                    with recorder:
                        result = op(sample.input, *sample.args, **sample.kwargs)
                        if grad:
                            backward(result)
                except Exception:
                    continue


def run_others(recorder):
    """What those samples do not reach: composite operators, and operators of modules."""
    x, y = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    image, ids = torch.randn(2, 8, 6, 6), torch.tensor([[0, 2, 1], [3, 3, 0]])
    calls = [
        (aten.linear.default, x, torch.randn(5, 4), torch.randn(5)), (aten.matmul.default, x, y), (aten.matmul.default, x[0], y[0]),
        (aten.broadcast_to.default, x, [6, 2, 3, 4]), (aten.chunk.default, x, 2, 1), (aten.contiguous.default, x.mT),
        (aten.flatten.using_ints, x, 1, 2), (aten.movedim.int, x, 0, 2), (aten.movedim.intlist, x, [0, 1], [1, 0]),
        (aten.narrow.default, x, 1, 1, 2), (aten.outer.default, x[0, 0], y[0, 0]), (aten.pad.default, image, [1, 2, 1, 0], "reflect"),
        (aten.pad.default, image, [1, 2, 1, 0], "constant", 1.0), (aten.reshape.default, x, [6, 4]), (aten.square.default, x),
        (aten.stack.default, [x, x + 1], 1), (aten.tile.default, x, [2, 1]), (aten.to.dtype, x, torch.float64),
        (aten.true_divide.Tensor, x, x + 1), (aten.unfold.default, x, 2, 2, 1), (aten.channel_shuffle.default, image, 4),
        (aten.native_channel_shuffle.default, image, 4), (aten.upsample_bicubic2d.default, image, [9, 7], True, None, None),
        (aten._upsample_bicubic2d_aa.default, image, [3, 4], False, None, None), (aten.upsample_linear1d.default, x, [7], False, None),
        (aten._upsample_bilinear2d_aa.default, image, [3, 4], True, 0.5, None), (aten.embedding.default, torch.randn(4, 5), ids, 1),
        (aten.embedding_dense_backward.default, torch.randn(2, 3, 5), ids, 4, 1, False),
        (aten.embedding_dense_backward.default, torch.randn(2, 3, 5), ids, 4, -1, True),
        (aten.masked_scatter_backward.default, x, x > 0, [24]), (aten.as_strided_scatter.default, x, x[0], [3, 4], [4, 1], 4),
        (aten.slice_scatter.default, x, x[:, :2], 1, 0, 2), (aten.avg_pool1d.default, x, [2], [1], [1], False, True),
        (aten.pixel_shuffle.default, image, 2), (aten.pixel_unshuffle.default, image, 2), (aten.norm.Scalar, x, 2),
        (aten.binary_cross_entropy_with_logits.default, x, torch.sigmoid(x), None, x[0, 0], 1), (aten.std.correction, x, [1]),
        (aten._grouped_mm.default, torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(2, 8, 16, dtype=torch.bfloat16),
         torch.tensor([2, 6], dtype=torch.int32)), (aten.fill.Scalar, x, 2.0), (aten.fill.Tensor, x, torch.tensor(2.0)),
        (aten.isfinite.default, x), (aten.rot90.default, x, 1, [0, 1]), (aten.lift_fresh_copy.default, x),
        (aten._unsafe_view.default, x, [6, 4]), (aten.detach.default, x), (aten.alias.default, x), (aten.t.default, x[0]),
        (aten._native_batch_norm_legit_functional.default, image, torch.randn(8), torch.randn(8), torch.randn(8), torch.rand(8), True, 0.1, 1e-5),
        (aten._native_batch_norm_legit.no_stats, image, torch.randn(8), torch.randn(8), True, 0.1, 1e-5),
        (aten._native_batch_norm_legit_no_training.default, image, torch.randn(8), torch.randn(8), torch.randn(8), torch.rand(8), 0.1, 1e-5),
        (aten.native_batch_norm.default, image, torch.randn(8), torch.randn(8), torch.randn(8), torch.rand(8), False, 0.1, 1e-5),
        (aten.native_batch_norm.default, image, None, None, None, None, True, 0.1, 1e-5),
        (aten.affine_grid_generator.default, torch.randn(2, 2, 3), [2, 3, 4, 5], True), (aten.copy.default, x, x[0]),
        (aten.affine_grid_generator.default, torch.randn(2, 3, 4), [2, 3, 4, 5, 6], False),
        (aten._upsample_bicubic2d_aa_backward.default, torch.randn(2, 8, 3, 4), [3, 4], [2, 8, 6, 6], False, None, None),
        (aten.value_selecting_reduction_backward.default, x[0], 1, torch.tensor([[0, 2, 1, 1], [0, 0, 2, 2], [1, 0, 0, 0]]), [3, 3, 4], False),
        (aten.randperm.generator, 6), (aten.rand.generator, [2, 3]), (aten.randn.generator, [2, 3]), (aten.randint.generator, 9, [2, 3]),
        (aten.randint.low_generator, 2, 9, [2, 3]), (aten.uniform.default, x, 0.0, 1.0), (aten.normal_functional.default, x, 0.0, 1.0),
        (aten.exponential.default, x, 1.0), (aten.bernoulli.p, x, 0.5), (aten.multinomial.default, torch.rand(2, 5), 3, False),
    ]
    three = torch.randn(2, 3, 4, 4, 4)
    calls += [
        (aten.view.dtype, x, torch.int32), (aten.narrow.Tensor, x, 1, torch.tensor(1), 2), (aten.split.sizes, x, [1, 2], 1),
        (aten.scatter.value_reduce, x[0], 1, torch.tensor([[0, 1], [2, 2]]), 2.0, "add"), (aten.std.default, x, True), (aten.std.dim, x, [1], True),
        (aten.var.default, x, True), (aten.var.dim, x, [1], True), (aten.var_mean.default, x, True), (aten.var_mean.dim, x, [1], True),
        (aten.max.other, x, x[0]), (aten.min.other, x, x[0]), (aten.bernoulli.Tensor, x, torch.rand(2, 3, 4)),
        (aten.norm.ScalarOpt_dtype, x, 2, torch.float64), (aten.norm.ScalarOpt_dim_dtype, x, 2, [1], False, torch.float64),
        (aten.searchsorted.Scalar, x[0, 0].sort().values, 0.5), (aten.bucketize.Scalar, 0.5, x[0, 0].sort().values),
        (aten.where.ScalarSelf, x > 0, 1.0, x), (aten.where.ScalarOther, x > 0, x, 1.0), (aten.where.Scalar, x > 0, 1.0, 2.0),
        (aten.xlogy.Scalar_Self, 2.0, x.abs()), (aten.xlogy.Scalar_Other, x, 2.0), (aten.remainder.Scalar_Tensor, 2.0, x + 5),
        (aten.floor_divide.Scalar, x, 2.0), (aten.fmod.Scalar, x, 2.0), (aten.true_divide.Scalar, x, 2.0), (aten.to.other, x, ids),
        (aten.to.device, x, torch.device("cpu"), torch.float64), (aten.to.dtype_layout, x), (aten.copysign.Scalar, x, -1.0), (aten.where.default, x > 0),
        (aten.clamp_max.default, x, 0.5), (aten.div.Scalar_mode, x, 0.3, "floor"),
        
        (aten.upsample_bicubic2d.vec, image, [9, 7], False, None), (aten.upsample_bilinear2d.vec, image, None, True, [1.5, 2.0]),
        (aten.upsample_linear1d.vec, x, [7], False, None), (aten.upsample_nearest1d.vec, x, None, [2.0]),
        (aten.upsample_nearest2d.vec, image, [3, 4], None), (aten.upsample_nearest3d.vec, three, [5, 5, 3], None),
        (aten.upsample_trilinear3d.vec, three, [5, 5, 3], False, None), (aten._upsample_nearest_exact1d.vec, x, [3], None),
        (aten._upsample_nearest_exact2d.vec, image, [3, 9], None), (aten._upsample_nearest_exact3d.vec, three, [3, 2, 7], None),
        (aten._upsample_bicubic2d_aa.vec, image, [3, 4], False, None), (aten._upsample_bilinear2d_aa.vec, image, [3, 4], False, None),
        *((operator, torch.tensor([6, 5]), 3) for operator in (aten.bitwise_and.Scalar, aten.bitwise_or.Scalar, aten.bitwise_xor.Scalar)),
        *((operator, 3, torch.tensor([6, 5])) for operator in (aten.bitwise_and.Scalar_Tensor, aten.bitwise_or.Scalar_Tensor,
                                                               aten.bitwise_xor.Scalar_Tensor)),
    ]
    with torch.no_grad(), recorder:
        for function, *args in calls:
            positional = sum(not one.kwarg_only for one in function._schema.arguments)
            last = {one.name: value for one, value in zip(function._schema.arguments[positional:], args[positional:])}
            if any("Generator" in str(one.type) for one in function._schema.arguments):
                last["generator"] = torch.Generator()
            call = Call(function._schema, args[:positional], last)
            recorder.keep(call.finish(function(*args[:positional], **last)))
    parameter = torch.nn.Parameter
    with recorder:
        for training in (True, False):
            for module in (torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8, affine=False, track_running_stats=False)):
                module.train(training)
                backward(module(image))
        backward(torch._weight_norm(parameter(torch.randn(5, 4)), parameter(torch.rand(5, 1)), 0))
        backward(torch._weight_norm(parameter(torch.randn(5, 4)), parameter(torch.rand(1, 4)), 1))
        q = [parameter(torch.randn(2, 4, 6, 8)) for _ in range(3)]
        for mask in (None, torch.randn(2, 1, 6, 6)):
            backward(aten._scaled_dot_product_flash_attention_for_cpu.default(*q, 0.0, mask is None, attn_mask=mask)[0])
        pooled, indices = torch.nn.functional.max_pool2d(parameter(image), 2, return_indices=True)
        backward(torch.nn.functional.max_unpool2d(pooled, indices, 2))
        pooled, indices = torch.nn.functional.max_pool3d(parameter(image), 2, return_indices=True)
        backward(torch.nn.functional.max_unpool3d(pooled, indices, 2))


def run_own(recorder):
    """Calls of twobp's own operators."""
    x, gain, qkv, table = torch.randn(2, 3, 8), torch.rand(8), torch.randn(2, 6, 32), torch.rand(6, 2)
    rows, heads, sums = torch.randn(2, 6, 16), torch.randn(2, 4, 6, 4), torch.randn(2, 4, 6)
    few, logits, labels = torch.randn(2, 2, 6, 4), torch.randn(4, 7), torch.tensor([0, 6, -100, 3])
    flat, experts, ends = torch.randn(6, 4), torch.randn(2, 4, 3), torch.tensor([2, 6])
    packed, scales, code, half = torch.randint(256, (6,), dtype=torch.uint8), torch.rand(3), torch.linspace(-1, 1, 16), {"dtype": "bfloat16"}
    for name, results, *args in (
            ("dropout", 2, x, 0.5, {"random": 1}), ("rms_norm", 2, x, gain, 1e-6), ("rms_norm_backward", 2, x, x, gain, torch.rand(2, 3, 1)),
            ("glu", 1, x, "silu"), ("glu_backward", 1, x[..., :4], x, "gelu"), ("rotary", 1, heads, table, table, False),
            ("attention", 3, qkv, table, table, 4, 2, True), ("attention", 3, qkv, None, None, 4, 2, False),
            ("attention_backward", 1, rows, qkv, rows, sums, table, table, 4, 2, True), ("causal_attention", 2, heads, few, few, None),
            ("causal_attention_backward", 3, heads, heads, few, few, heads, sums, 0.5), ("cross_entropy", 2, logits, labels, -100),
            ("grouped_mm", 1, flat, experts, ends), ("grouped_mm_weight", 1, flat, torch.randn(6, 3), ends),
            ("linear_4bit", 1, flat, packed, scales, code, 3, 4, half),
            ("linear_4bit_backward", 1, torch.randn(6, 3), packed, scales, code, 4, 4, half)):
        call = Call.__new__(Call)
        call.tensors, call.slots, call.list, call.tensor_returns = [], {}, False, [True] * results
        call.text = {"op": "twobp::" + name, "args": [one if isinstance(one, dict) else call.argument("", one) for one in args]}
        recorder.keep(call.finish(None))


def main():
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    recorder = Recorder()
    run_own(recorder)
    run_others(recorder)
    run_samples(recorder)
    lines = [json.dumps(call, separators=(",", ":")) for name in sorted(recorder.calls) for call in recorder.calls[name].values()]
    (HERE / "operator_calls.jsonl.gz").write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))
    found = {name.removeprefix("aten::").split(".")[0] for name in recorder.calls}
    print(len(lines), "calls of", len(recorder.calls), "overloads; without a call:", sorted(listed() - found))


if __name__ == "__main__":
    main()
