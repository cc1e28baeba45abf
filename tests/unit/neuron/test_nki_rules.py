"""The strict interpreter of NKI: every rule refuses what it is for, on the cores it is for."""

import pytest

from flexattn.device.neuroncore import CORES
from flexattn.errors import KernelError
from tests.nki import MATMUL, TILES, run_lines

ADD = "nisa.tensor_tensor(dst=f, data1=f, data2=f, op=nl.add)"
RANGE = (
    "nisa.range_select(dst=f, on_true_tile=g, comp_op0=nl.{}, comp_op1=nl.less, bound0={}, "
    "bound1=c, range_start={}, on_false_value={})"
)

# What is refused: the lines, words of the message, and the targets if not all.
REFUSED = {
    "partitions": ("t = nl.ndarray((256, 8), dtype=nl.float32, buffer=nl.sbuf)", "256 partitions"),
    "one dimension": ("t = nl.ndarray((8,), dtype=nl.float32, buffer=nl.sbuf)", "2 to 5"),
    "empty": ("t = nl.ndarray((8, 0), dtype=nl.float32, buffer=nl.sbuf)", "at least 1"),
    "dtype": ("t = nl.ndarray((8, 8), dtype='float64', buffer=nl.sbuf)", "float64"),
    "buffer": ("t = nl.ndarray((8, 8), dtype=nl.float32, buffer='l2')", "l2"),
    "address": (
        "t = nl.ndarray((8, 8), nl.float32, nl.sbuf, address=(0, 0))",
        "address",
    ),
    "sbuf": ("t = nl.ndarray((128, 65536), dtype=nl.float32, buffer=nl.sbuf)", "sbuf"),
    "psum": ("t = nl.ndarray((128, 3073), dtype=nl.float32, buffer=nl.psum)", "psum"),
    "positional": ("nisa.tensor_copy(f, g)", "positional"),
    "no such instruction": ("nisa.tensor_softmax(dst=f, data=g)", "tensor_softmax"),
    "no such argument": ("nisa.tensor_copy(dst=f, src=g, mask=u)", "mask"),
    "index past the end": ("f[:, 512]", "512"),
    "slice past the end": ("f[:, 4:513]", "stays inside"),
    "empty slice": ("f[:, 4:4]", "stays inside"),
    "index of another kind": ("f[c]", "integers"),
    "negative step": ("f.ap(pattern=[[512, 128], [-1, 4]])", "negative"),
    "pattern past the end": ("f.ap(pattern=[[512, 128], [1, 513]])", "stays inside"),
    "partition step": ("f.ap(pattern=[[1, 128], [1, 4]])", "partition"),
    "past a partition": ("f.ap(pattern=[[512, 4], [1, 8]], offset=508)", "partition"),
    "start partition": ("nisa.tensor_copy(dst=f[16:80, :], src=g[0:64, :])", "start at one of"),
    "engine in hbm": ("nisa.tensor_copy(dst=f[0:4, 0:8], src=x)", "SBUF and PSUM"),
    "partitions differ": ("nisa.tensor_copy(dst=f[0:32, :], src=g)", "equal partitions"),
    "elements differ": ("nisa.tensor_copy(dst=f[:, 0:8], src=g)", "equal"),
    "engine": ("nisa.tensor_copy(dst=f, src=g, engine=nisa.engine.tensor)", "runs on"),
    "memset of an integer": ("nisa.memset(dst=u, value=1.5)", "integer"),
    "dma of psum": ("nisa.dma_copy(dst=f, src=p[:, 0:512])", "PSUM"),
    "dma of another size": ("nisa.dma_copy(dst=f, src=x)", "as many"),
    "matmul into sbuf": (MATMUL.format("f", "g[:, 0:128]", "g", False), "psum"),
    "matmul of psum": (MATMUL.format("p[:, 0:512]", "p[:, 0:128]", "g", False), "sbuf"),
    "matmul stationary": (MATMUL.format("p[:, 0:512]", "g[:, 0:256]", "g", False), "128"),
    "matmul contraction": (MATMUL.format("p[:, 0:512]", "g[0:64, 0:128]", "g", False), "contract"),
    "matmul moving": (MATMUL.format("p", "g[:, 0:128]", "w", False), "1024 moving", "trn1 trn2"),
    "matmul shape": (MATMUL.format("p[:, 0:256]", "g[:, 0:128]", "g", False), "[128, 512]"),
    "matmul mixed": (MATMUL.format("p[:, 0:512]", "h[:, 0:128]", "g", False), "float32 goes"),
    "matmul of bytes": (MATMUL.format("p[:, 0:512]", "u[:, 0:128]", "h", False), "uint8"),
    "matmul bank": (
        MATMUL.format("p[:, 256:768]", "g[:, 0:128]", "g", False),
        "bank",
        "trn1 trn2",
    ),
    "matmul dst dtype": (MATMUL.format("q", "h[:, 0:128]", "h", False), "writes", "trn1 trn2"),
    "matmul accumulates": (
        MATMUL.format("p[:, 0:512]", "g[:, 0:128]", "g", True),
        "no matmul began",
    ),
    "matmul unsaid": (MATMUL.format("p[:, 0:512]", "g[:, 0:128]", "g", None), "True or False"),
    "accumulate on a copy": (
        MATMUL.format("p[:, 0:512]", "g[:, 0:128]", "g", False)
        + "\nnisa.tensor_copy(dst=p[:, 0:512], src=g)\n"
        + MATMUL.format("p[:, 0:512]", "g[:, 0:128]", "g", True),
        "no matmul began",
    ),
    "transpose into sbuf": ("nisa.nc_transpose(dst=f[:, 0:128], data=g[:, 0:128])", "psum"),
    "transpose of width": ("nisa.nc_transpose(dst=p[:, 0:128], data=g[:, 0:256])", "at most 128"),
    "transpose dtype": ("nisa.nc_transpose(dst=p[:, 0:128], data=h[:, 0:128])", "dtype stays"),
    "two in psum": (
        "nisa.tensor_tensor(dst=f, data1=p[:, 0:512], data2=p[:, 512:1024], op=nl.add)",
        "PSUM",
    ),
    "unary as binary": ("nisa.tensor_tensor(dst=f, data1=f, data2=f, op=nl.exp)", "two operands"),
    "half operand": (
        "nisa.tensor_scalar(dst=f, data=g, op0=nl.add, operand0=h[:, 0:1])",
        "float32",
    ),
    "wide operand": ("nisa.tensor_scalar(dst=f, data=g, op0=nl.add, operand0=g)", "one element"),
    "stt in psum": (
        "nisa.scalar_tensor_tensor(dst=f, data=p[:, 0:512], op0=nl.add, operand0=1.0, "
        "op1=nl.add, operand1=p[:, 512:1024])",
        "PSUM",
    ),
    "reduce partitions": ("nisa.tensor_reduce(dst=c, op=nl.add, data=f, axis=0)", "last free"),
    "reduce shape": ("nisa.tensor_reduce(dst=f, op=nl.maximum, data=f, axis=1)", "1 elements"),
    "no reduction": ("nisa.tensor_reduce(dst=c, op=nl.subtract, data=f, axis=1)", "no reduction"),
    "predicate": ("nisa.tensor_copy_predicated(dst=f, src=g, predicate=g)", "uint8"),
    "predicated dtype": ("nisa.tensor_copy_predicated(dst=f, src=h, predicate=u)", "dtype stays"),
    "range_select": (RANGE.format("less", "c", 0, -3.4028235e38), "NeuronCore-v3", "trn1"),
    "range fill": (RANGE.format("less", "c", 0, -1.0), "FP32_MIN", "trn2 trn3"),
    "range bound": (RANGE.format("less", "1.0", 0, -3.4028235e38), "it is a tensor", "trn2 trn3"),
    "range operator": (RANGE.format("add", "c", 0, -3.4028235e38), "compares", "trn2 trn3"),
    "range start": (RANGE.format("less", "c", 2**24, -3.4028235e38), "2^24", "trn2 trn3"),
    "activation": ("nisa.activation(dst=f, op=nl.add, data=g)", "activation function"),
    "activation bias": ("nisa.activation(dst=f, op=nl.exp, data=g, bias=1.0)", "a column"),
    "activation sum": (
        "nisa.activation(dst=f, op=nl.exp, data=g, reduce_op=nl.maximum, reduce_res=c, "
        "reduce_cmd=nisa.reduce_cmd.reset_reduce)",
        "it adds",
    ),
    "activation command": (
        "nisa.activation(dst=f, op=nl.exp, data=g, reduce_op=nl.add, reduce_res=c)",
        "reset_reduce",
    ),
    "iota in psum": ("nisa.iota(dst=p, pattern=[[1, 1024]])", "sbuf"),
    "iota pattern": ("nisa.iota(dst=f, pattern=[[1, 511]])", "511"),
    "affine_select of psum": (
        "nisa.affine_select(dst=f, pattern=[[1, 512]], channel_multiplier=0, "
        "on_true_tile=p[:, 0:512], on_false_value=0.0, cmp_op=nl.equal)",
        "sbuf",
    ),
}
EXTRA = """
w = nl.ndarray((128, 1024), dtype=nl.float32, buffer=nl.sbuf)
q = nl.ndarray((128, 512), dtype=nl.bfloat16, buffer=nl.psum)
"""


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (name, target)
        for name, (_, _, *where) in REFUSED.items()
        for target in (where[0].split() if where else CORES)
    ],
)
def test_a_rule_refuses(name, target):
    lines, words = REFUSED[name][:2]
    with pytest.raises(KernelError, match="(?s)" + words.replace("[", r"\[").replace("^", r"\^")):
        run_lines(TILES + EXTRA + lines, target)


@pytest.mark.parametrize(
    ("name", "target"),
    [("matmul moving", "trn3"), ("matmul bank", "trn3"), ("matmul dst dtype", "trn3"),
     ("range_select", "trn2")],
)  # fmt: skip
def test_what_a_later_core_allows(name, target):
    lines = REFUSED[name][0]
    run_lines(TILES + EXTRA + lines, target)
