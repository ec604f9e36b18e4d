"""A module whose capture is written by hand, to test the trainer apart from capture: layers y = relu(x W^T + b), and the mean
squared error."""
import types

import torch

WIDTH = 4


class Mlp(torch.nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
        self.register_buffer("never_changes", torch.ones(2))

    def forward(self, input, target):
        for layer in self.layers:
            input = torch.relu(layer(input))
        return ((input - target) ** 2).sum(dim=1).mean()


class HandCaptured:
    """Has the members of twobp.capture.Captured that the trainer reads: `graph`, the tensors and `add_shape`."""

    def __init__(self, module, example):
        trained = {name: tensor.detach() for name, tensor in module.named_parameters()}
        self.parameters, self.buffers, self.constants = trained, {}, {"two": torch.tensor(2.0)}
        count = len(module.layers)
        kinds = [0] + [1] * (count - 2) + [2]
        self.graph = {
            "format": "twobp graph", "version": 1, "torch": "2.13", "module": "Mlp", "dtype": "float32",
            "kinds": ["first", "middle", "last"],
            "layers": [{"name": f"layers.{i}", "kind": kind, "parameters": [f"layers.{i}.weight", f"layers.{i}.bias"], "buffers": [],
                        "constants": ["two"] if kind == 2 else []} for i, kind in enumerate(kinds)],
            "parameters": {name: {"dtype": "float32", "shape": list(one.shape), "frozen": False} for name, one in trained.items()},
            "buffers": {}, "shapes": []}
        self.variant, self.why = types.SimpleNamespace(number=0, batches=[]), ""
        self.add_shape(example)

    def follow(self, training=True):
        return None

    def forget_variants(self):
        return []

    def constants_in_use(self):
        return self.constants

    def add_shape(self, batch, beside=None):
        samples = batch["input"].shape[0]
        self.variant.batches.append(samples)
        self.graph["shapes"].append({
            "fields": {name: {"dtype": "float32", "shape": [samples, WIDTH]} for name in ("input", "target")},
            "programs": [_program("first"), _program("middle"), _program("last")], "targets": {"count": samples}})


def _program(kind):
    """Slots: 0 x, 1 W, 2 b, 3 target, 4 loss weight, 5 the constant 2; 10 to 19 of F, 20 to 29 of I and W."""
    x = {"from": "field", "name": "input", "slot": 0} if kind == "first" else {"from": "value", "index": 0, "slot": 0}
    inputs = [x, {"from": "parameter", "index": 0, "slot": 1}, {"from": "parameter", "index": 1, "slot": 2}]
    forward = [_call("t", [_v(1)], 10), _call("addmm", [_v(2), _v(0), _v(10), 1, 1], 11), _call("relu", [_v(11)], 12)]
    if kind == "last":
        inputs += [{"from": "field", "name": "target", "slot": 3}, {"from": "loss_weight", "slot": 4},
                   {"from": "constant", "index": 0, "slot": 5}]
        forward += [_call("sub.Tensor", [_v(12), _v(3), 1], 13), _call("pow.Tensor_Scalar", [_v(13), 2], 14),
                    _call("sum", [_v(14), None], 15), _call("mul.Tensor", [_v(15), _v(4)], 16)]
        before = [_call("mul.Tensor", [_v(20), _v(4)], 27), _call("mul.Tensor", [_v(13), _v(5)], 28),
                  _call("mul.Tensor", [_v(28), _v(27)], 21)]
        output, dy = 16, 21
    else:
        before, output, dy = [], 12, 20
    p1 = before + [_call("threshold_backward", [_v(dy), _v(12), 0], 22), _call("sum.dim_IntList", [_v(22), [0], False, None], 23),
                   {"add_to": 1, "how": "sum", "args": [_v(23)]}]
    if kind != "first":
        p1.append(_call("mm", [_v(22), _v(1)], 24))
    return {"slots": 30, "inputs": inputs, "outputs": [{"slot": output, "gradient": 20}], "new_buffers": [], "forward": forward,
            "backward_p1": p1, "input_gradients": [] if kind == "first" else [{"index": 0, "slot": 24}],
            "backward_p2": [{"name": "weight", "code": [_call("t", [_v(22)], 25),
                                                        {"add_to": 0, "how": "product", "args": [_v(25), _v(0)]}]}]}


def _v(slot):
    return {"v": slot}


def _call(op, arguments, out):
    return {"op": f"aten::{op}", "args": arguments, "out": [out]}
