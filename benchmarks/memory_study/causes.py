"""The causes of the memory factor. Part of the bytes that are held after F is still needed by W. In addition, W needs the bytes of dL/dz.

Bytes after F and after I are measured. The share of dL/dz in the latter follows from the layer. W of a weight reads its input and the gradient of its output, so dL/dz is as big
as the outputs of the layer's weights.
"""

import models

FP32 = 4


def conv_outputs(model, kind):
    """Numbers per picture in the outputs of a bottleneck's three convolutions. The second one has the stride. The first block of a stage also has the
    convolution of the shortcut."""
    stage = int(kind.split()[1])
    first = "first" in kind
    before = (models.IMAGE // 4 // 2 ** max(0, stage - 1)) ** 2  # pixels; the stem divides the side by four
    after = (models.IMAGE // 4 // 2**stage) ** 2
    width = model["widths"][stage]
    inner = width // 4
    return inner * (before if first else after) + inner * after + width * after * (2 if first else 1)


def gradient_numbers(study_config, family, kind):
    """The count of numbers in dL/dz of one micro-batch. None for the kinds that are not repeated (embedding, stem, head)."""
    model = study_config["model"]
    samples = study_config["pipeline"]["micro_batch_size"]
    if family == "resnet":
        return samples * conv_outputs(model, kind) if kind.startswith("stage") else None
    tokens = samples * study_config["data"]["sequence"]
    dim = model["dim"]
    if kind == "attention":
        kv = dim // model["heads"] * model.get("kv_heads", model["heads"])
        return tokens * (dim + 2 * kv + dim)
    if kind == "mlp":
        return tokens * (model["hidden"] * (2 if family == "llama" else 1) + dim)
    if kind in ("in_proj", "mixer"):
        inner = model["expand"] * dim
        rest = (-(-dim // 16) + 2 * model["state"]) + inner + dim
        return tokens * (2 * inner if kind == "in_proj" else rest)
    return None


def cause(result, kind):
    """Bytes of one micro-batch in all layers of the kind: held after F, held after F and still needed after I, dL/dz, held after I."""
    costs = result["kinds"][kind]
    (measured,) = costs["costs"]
    numbers = gradient_numbers(result["config"], result["family"], kind)
    stash = measured["held_bytes_after_p1"]
    gradients = None if numbers is None else FP32 * numbers
    return {"kind": kind, "layers": costs["layers"],
            "after_forward": costs["layers"] * measured["held_bytes_after_forward"],
            "kept": None if gradients is None else costs["layers"] * (stash - gradients),
            "gradients": None if gradients is None else costs["layers"] * gradients,
            "after_p1": costs["layers"] * stash}


def causes(result):
    """The causes for each kind, and for the model as `all`."""
    rows = [cause(result, kind) for kind in result["kinds"]]
    whole = {"kind": "the model", "layers": sum(row["layers"] for row in rows), "kept": None, "gradients": None}
    for name in ("after_forward", "after_p1"):
        whole[name] = sum(row[name] for row in rows)
    return rows + [whole]
