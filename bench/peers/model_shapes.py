"""Parameters of the model that the generated checkpoints hold: block -> (name, shape)."""


def blocks(layers, width, vocabulary):
    yield "", [("transformer.wte.weight", (vocabulary, width)), ("transformer.ln_f.weight", (width,))]
    for index in range(layers):
        yield f"transformer.blocks.{index}", [
            ("att_proj.weight", (3 * width, width)), ("attn_out.weight", (width, width)),
            ("ff_proj.weight", (4 * width, width)), ("ff_out.weight", (width, 4 * width)),
            ("attn_norm.weight", (width,)), ("ff_norm.weight", (width,))]


def parameters(*sizes):
    for block, rows in blocks(*sizes):
        for name, shape in rows:
            yield f"{block}.{name}" if block else name, shape


GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
