"""What is drawn: tensors, values, trees, and the places that share them, as text for `values.build`."""
import torch
from hypothesis import strategies as st

import values

FLOATS = ["float32", "bfloat16", "float16", "float64"]
SMALL_FLOATS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]
COMPLEX = ["complex64", "complex128", "complex32"]
INTEGERS = ["int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"]
# What is not drawn yet, while something is being mended.
KNOWN = frozenset()
MOST_ELEMENTS = 1 << 22  # of a view that sees elements several times
DTYPES = FLOATS + INTEGERS + COMPLEX + SMALL_FLOATS + ["float4_e2m1fn_x2"]
NAMES = ["a", "b", "weight", "0", "1", "", ".", "a.b", "a.", ".a", "a..b", "a/b", "..", "../x", "/etc", "a b", "é", "重み",
         "😀", "e\u0301", "a\nb", "a\x00b", "\u202e", "__metadata__", "tessera.tree", "state_dict", "[0]", "w[0:2]",
         "'", '"', "\\", "-1", "True", "None", "x" * 300, "%s", "{}", "*", "~", "model", "optim", "storage", "cpu"]
INTS = [0, 1, -1, 2, 7, 255, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 2**64, -(2**63) - 1, 10**30, -(10**400)]
REALS = ["0.0", "-0.0", "1.5", "0.1", "nan", "inf", "-inf", "5e-324", "1.7976931348623157e308", "1e22"]


def texts(values_):
    return st.sampled_from([repr(value) for value in values_])


names = st.one_of(texts(NAMES[:5]), texts(NAMES), st.text(max_size=4).map(repr))
reals = st.one_of(st.sampled_from(REALS), st.floats().map(repr))
# What dicts have as keys and sets as members.
numbers = st.one_of(texts(INTS), reals, st.sampled_from(["True", "False", "None"]))
pairs = st.tuples(texts(NAMES[:24]), texts(INTS)).map(lambda two: f"({two[0]}, {two[1]})")
hashables = st.one_of(names, numbers, pairs)
other_scalars = st.one_of(
    st.binary(max_size=5).map(repr), st.binary(max_size=5).map(lambda raw: f"bytearray({raw!r})"),
    st.complex_numbers().map(lambda z: f"complex({z.real!r}, {z.imag!r})"),
    st.sampled_from(["torch.Size([2, 3])", "torch.float16", "torch.device('cpu')", "numpy.float32(0.1)",
                     "numpy.int64(3)", "numpy.arange(6).reshape(2, 3)", "range(3)", "slice(1, None)", "()", "set()",
                     "frozenset({1})", "Box()"]))
scalars = st.one_of(numbers, names, other_scalars)


@st.composite
def tensors(draw, dtypes=tuple(DTYPES), views=True, lazy=True, wrapped=True):
    """One tensor: random bits, then views of it, then perhaps a Parameter around it."""
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 5, 1, 2, 3, 7, 4, 0]), max_size=4)))
    if draw(st.integers(0, 19)) == 19:  # more than the windows that elements pass through
        shape = draw(st.sampled_from([(300001,), (701, 401), (70, 2, 60, 33), (1, 3, 100003)]))
    # Few seeds: equal tensors that share nothing are worth having too.
    text = f"t({dtype!r}, {shape}, {draw(st.integers(0, 9))})"
    if views:
        text = draw(viewed(text, lazy))
    if wrapped and dtype in FLOATS + COMPLEX and draw(st.integers(0, 3)) == 3:
        return f"param({text}, {draw(st.booleans())})"
    return text


@st.composite
def viewed(draw, text, lazy=True, pool=()):
    """`text`, a tensor, seen through up to three views."""
    for _ in range(draw(st.integers(0, 3))):
        now = values.build(text, pool)
        options = ["widen"]
        if now.dim() > 0:
            options += ["cut", "select", "transpose", "unfold"]
        if lazy and now.dtype in (torch.complex64, torch.complex128):
            options += ["conj", "imag", "conj"]
        if lazy and now.is_floating_point() and now.dtype.itemsize > 1:
            options.append("neg")
        text = f"{text}{draw(one_view(now, draw(st.sampled_from(options))))}"
        if text.endswith("!neg"):
            text = f"neg({text[:-4]})"
    return text


@st.composite
def one_view(draw, now, option):
    if option in ("conj", "imag"):
        return f".{option}{'()' if option == 'conj' else ''}"
    if option == "neg":
        return "!neg"
    if option == "widen":
        dim, size = draw(st.integers(0, now.dim())), draw(st.integers(0, 3))
        return f".unsqueeze({dim}).expand({', '.join(['-1'] * dim + [str(size)] + ['-1'] * (now.dim() - dim))})"
    dim = draw(st.integers(0, now.dim() - 1))
    size = now.shape[dim]
    if option == "transpose":
        return f".transpose({dim}, {draw(st.integers(0, now.dim() - 1))})"
    if option == "select" and size > 0:
        return f".select({dim}, {draw(st.integers(0, size - 1))})"
    if option == "unfold" and size > 0:
        # Windows of windows of a long tensor would have more elements than any memory.
        window = min(size, max(1, MOST_ELEMENTS // now.numel()) if now.numel() else size)
        return f".unfold({dim}, {draw(st.integers(1, window))}, {draw(st.integers(1, 3))})"
    start = draw(st.integers(0, max(size - 1, 0)))
    index = ":, " * dim + f"{start}:{draw(st.integers(min(start + 1, size), size))}:{draw(st.integers(1, 3))}"
    return f"[{index}]"


def containers(items, keys, without):
    least = 1 if "empty" in without else 0

    def dict_of(word):
        return st.lists(st.tuples(keys, items), min_size=least, max_size=4).map(
            lambda pairs: f"{word}{', '.join(f'({k}, {v})' for k, v in pairs)})")

    def sequence(begin, end, **sizes):
        return st.lists(items, max_size=4, **sizes).map(lambda parts: f"{begin}{', '.join(parts)}{end}")

    sets = st.lists(hashables, max_size=3).map(lambda parts: f"set([{', '.join(parts)}])")
    plain = [dict_of("d("), sequence("[", "]"), sets]
    kinds = [dict_of("od("), dict_of("dd(list, ")]
    inside = [sequence("tuple([", "])"), st.tuples(items, items).map(lambda two: f"Point({two[0]}, {two[1]})"),
              st.lists(st.tuples(st.sampled_from(["a", "b"]), items), max_size=2, unique_by=lambda pair: pair[0]).map(
                  lambda pairs: f"Box({', '.join(f'{k}={v}' for k, v in pairs)})")]
    return st.one_of(plain + ([] if "kinds" in without else kinds) + ([] if "inside" in without else inside))


class Case:
    """One drawn tree: `pool`, what several places share, and `tree`, both text."""

    def __init__(self, pool, tree, **more):
        self.pool, self.tree, self.more = pool, tree, more

    def value(self):
        return values.build(self.tree, self.pool)

    def __repr__(self):
        more = "".join(f", {name}={value!r}" for name, value in self.more.items())
        return f"Case({self.pool!r},\n     {self.tree!r}{more})"


@st.composite
def trees(draw, without=frozenset(), leaf=None):
    """A Case without more: any tree below a dict, `leaf` among its leaves."""
    keys = hashables if "keys" not in without else names
    if "conflict" in without:
        keys = keys.filter(lambda key: "." not in key)
    tensor = tensors(lazy="lazy" not in without, wrapped="param" not in without)
    pool = draw(st.lists(tensor, max_size=2))
    options = [tensor, tensor, scalars, tensor if leaf is None else leaf]
    for i, text in enumerate(pool):
        options.append(st.just(f"P[{i}]"))
        if not text.startswith("param"):
            options.append(viewed(f"P[{i}]", "lazy" not in without, pool))
    # Options are drawn by number: a choice among choices would be flattened, and scalars have many.
    one = st.integers(0, len(options) - 1).flatmap(options.__getitem__)
    inner = st.recursive(one, lambda items: containers(items, keys, without), max_leaves=8)
    count = draw(st.integers(1, 6))
    values_ = [draw(inner) for _ in range(count)]
    items = zip(draw(st.lists(keys, min_size=count, max_size=count, unique=True)), values_)
    return Case(pool, f"d({', '.join(f'({k}, {v})' for k, v in items)})")


MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 3), (3, 2)]


@st.composite
def placed(draw, mesh):
    """A tensor over the ranks of `mesh`: each of its dimensions divides the tensor along the dimension of this number,
    or copies it."""
    text = draw(tensors(lazy=False, wrapped=False))
    dims = st.sampled_from([None, *range(values.build(text).dim())])
    return f"sharded({text}, {', '.join(repr(draw(dims)) for _ in mesh)})"


@st.composite
def worlds(draw, without=frozenset()):
    """A Case with a mesh: what its ranks save together."""
    mesh = draw(st.sampled_from(MESHES))
    case = draw(trees(without, placed(mesh)))
    case.more["mesh"] = mesh
    return case


PARAMETERS = ["blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.10.att.q", "wte.weight", "ln_f.bias", "a", "é.重み"]


OLMO_TARGETS = [
    ["--to", "olmo-full"], ["--to", "olmo-torch-new", "--ranks", "2"], ["--to", "olmo-torch-new", "--ranks", "5"],
    ["--to", "olmo-legacy", "--ranks", "1"], ["--to", "olmo-legacy", "--ranks", "3"],
    ["--to", "olmo-local", "--ranks", "2"], ["--to", "olmo-local", "--ranks", "3", "--unit", "a"],
    ["--to", "olmo-local", "--ranks", "4", "--no-orig-params"]]
MODEL_DTYPES = [["float32"], ["float32"], ["bfloat16"], ["float64"], ["float32", "bfloat16"], DTYPES]


@st.composite
def optimizers(draw, of_name):
    """State of most parameters, which lie in one or two groups, with and without names."""
    state = []
    for name, text in of_name.items():
        if draw(st.integers(0, 4)) > 0:
            # Moments have the shape and type of their parameter.
            step = draw(st.integers(0, 9))
            state.append(f"({name!r}, d(('exp_avg', {text}.clone()), ('step', t('float32', (), {step}))))")
    names = list(of_name)
    cut = draw(st.integers(1, len(names)))
    named = draw(st.booleans())
    groups = []
    for group in filter(None, (names[:cut], names[cut:])):
        more = f", ('param_names', {group!r})" if named else ""
        groups.append(f"d(('params', {group!r}), ('lr', {draw(reals)}), ('betas', (0.9, 0.95)){more})")
    return f"d(('state', d({', '.join(state)})), ('param_groups', [{', '.join(groups)}]))" if state else ""


@st.composite
def trainings(draw):
    """A Case that is a model with its optimizer and a trainer's values, as OLMo's kinds have them."""
    tensor = tensors(draw(st.sampled_from(MODEL_DTYPES)), lazy=False, wrapped=False)
    of_name = draw(st.dictionaries(st.sampled_from(PARAMETERS), tensor, min_size=1, max_size=5))
    parts = [f"('model', d({', '.join(f'({name!r}, {text})' for name, text in of_name.items())}))"]
    if optimizer := draw(st.one_of(st.just(""), optimizers(of_name))):
        parts.append(f"('optim', {optimizer})")
    lists = st.lists(scalars, max_size=2).map(lambda items: f"[{', '.join(items)}]")
    for key in draw(st.lists(st.sampled_from(["epoch", "global_step", "rng", "é"]), max_size=2, unique=True)):
        parts.append(f"({key!r}, {draw(st.one_of(scalars, tensor, lists))})")
    return Case([], f"d({', '.join(parts)})", olmo=draw(st.sampled_from(OLMO_TARGETS)))
