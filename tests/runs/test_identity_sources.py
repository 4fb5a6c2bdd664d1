"""Every way of changing a value that we know, and the usual ones that must stay believed.

Each source makes a ``value``; with another number in it, a run that is asked for the value has
another fingerprint, or says that something is unknown. No source may be equal in both, and none
that is unknown is believed.
"""

# ruff: noqa: E501 - a source may be a line

import copy
import functools
import os
import random
import re
import subprocess
import sys
import types
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import anchorlens as al
from anchorlens.runs import identity
from anchorlens.runs.by_value import Known, identity_of
from tests.support.printed_code import ROOT, blocks_of
from tests.support.tiny_models import tiny_gpt2

# What sources name without an import, beside what `fingerprint_of` adds.
NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "modules": nn.modules.module}
NAMES |= {"al": al, "np": np, "tiny_gpt2": tiny_gpt2, "Enum": Enum, "Path": Path}
NAMES |= {"functools": functools, "partial": functools.partial, "sys": sys, "os": os}
NAMES |= {"types": types, "dataclass": dataclass, "field": field}
CALL = " def __call__(self, x): return x * self.k\n"
# What the number N is put into => how a function x -> x * N reads it there; or a source that makes the
# value itself. <first|second> is what differs, where it is no number. ``put`` sets an attribute or an
# entry that is restored after the source, and ``later`` calls what restores it.
EVERYDAY = (  # of which nothing may be unknown
    "k = N => k",
    "a = {'b': [N]} => a['b'][0]",
    "a = torch.tensor(N) => a.item()",
    "a = np.array([N]) => a[0]",
    "def f(x, k): return x * k\na = partial(f, k=N) => a(1)",
    "a = [N].copy => a()[0]",
    "class A: k = N => A.k",
    "value = lambda x: x * N",
    "def value(x):\n return (lambda y: y * N)(x)",
    "def value(x, k=N): return x * k",
    "def value(x, *, k=N): return x * k",
    "def make(k):\n return lambda x: x * k\nvalue = make(N)",
    "@torch.no_grad()\ndef value(x): return x * N",
    f"class A:\n def __init__(self, k): self.k = k\n{CALL}value = A(N)",
    f"class A:\n __slots__ = ('k',)\n{CALL}value = A()\nvalue.k = N",
    f"class A:\n @property\n def k(self): return N\n{CALL}value = A()",
    (
        "class A:\n def __init__(self, k): self.k = k\n def f(self, x): return x * self.k\n"
        "value = A(N).f"
    ),
    (
        "class P:\n def f(self): return N\nclass A(P):\n"
        " def __call__(self, x): return self.f() * x\nvalue = A()"
    ),
    "value = lambda x, y: x <+|-> y",
    "value = lambda x: x.<sum|mean>()",
    (
        "from anchorlens import SaliencyFlows\n<|class SaliencyFlows(SaliencyFlows): pass\n"
        ">value = SaliencyFlows()"
    ),
    "value = lambda p: torch.optim.<SGD|Adam>(p, lr=1)",
    "value = <1|1.0>",
    "value = <1|True>",
    "value = <1|'1'>",
    "value = <[1, 2]|[2, 1]>",
    "value = lambda x: <x.exp().sin()|x.sin().exp()>",
    "def value(x):\n y, z = x, x * 2\n return <y - z|z - y>",
    "value = <[1, 2]|(1, 2)>",
    "torch.manual_seed(int(N * 2))\nvalue = nn.Linear(2, 2)",
    "def value(x):\n< try:\n  x()\n  x()| x()\n try:\n  x()>\n except KeyError: pass",
)
OTHERS = (
    "a = ((N,),) => a[0][0]",
    "a = {N} => max(a)",
    "a = 'N' => float(a)",
    "a = torch.ones(1)\na.k = N => a.k",
    "class T(torch.Tensor): pass\na = torch.ones(1).as_subclass(T)\na.k = N => a.k",
    "a = torch.ones(1, requires_grad=True)\na.register_hook(lambda g: g * N) => a",
    "a = np.array([None], object)\nunread = N => a[0]",
    "class A(np.ndarray): pass\na = np.ones(1).view(A)\na.k = N => a.k",
    "from fractions import Fraction\na = Fraction(N) => float(a)",
    "from collections import defaultdict\na = defaultdict(lambda: N) => a['b']",
    "from types import MappingProxyType as M\na = M({'b': N}) => a['b']",
    "from collections import namedtuple\na = namedtuple('A', 'b')(N) => a.b",
    "a = memoryview(b'N') => float(bytes(a))",
    "a = Path('N') => float(str(a))",
    "a = slice(N) => a.stop",
    "import weakref\nclass A: k = N\nb = A()\na = weakref.ref(b) => a().k",
    "a = torch.Generator().manual_seed(int(N * 2)) => torch.rand(1, generator=a)",
    "torch.manual_seed(int(N * 2)) => torch.rand(1)",
    "torch.manual_seed(int(N * 2)) => x.bernoulli()",
    "torch.manual_seed(int(N * 2)) => F.dropout(x, 0.5)",
    "a = (N for _ in 'ab') => next(a)",
    "a = iter([N]) => next(a)",
    "import re\na = re.compile('N') => float(a.pattern)",
    "a = partial(abs)\na.k = N => a.k",
    "class P(partial): k = N\na = P(abs) => a.k",
    "def f(x): return x\nf.k = N => f.k",
    "k = N\ndef f(): pass => f.__globals__['k']",
    "def f(x: 'N'): pass => float(f.__annotations__['x'])",
    "k = N\n@functools.cache\ndef f(): return k\nf()\nk = 1 => f()",
    "m = types.ModuleType('m')\nm.k = N => m.k",
    "m = types.ModuleType('m')\nm.__getattr__ = lambda name: N => m.k",
    "class M(types.ModuleType): k = N\nm = M('m') => m.k",
    "k = N => globals()['k']",
    "k = N => eval('k')",
    "k = N => (exec('global j; j = k'), j)[1]",
    "m = types.ModuleType('m')\nm.k = N => vars(m)['k']",
    "m = types.ModuleType('m')\nm.k = N => getattr(m, 'k')",
    "m = types.ModuleType('m')\nm.k = N => m.__dict__['k']",
    "put(sys.modules, 'of_a_user', np.float64(N)) => sys.modules['of_a_user']",
    "put(sys.modules, 'of_a_user', np.float64(N)) => __import__('of_a_user')",
    "put(sys, 'argv', ['x', 'N']) => float(sys.argv[1])",
    "put(os.environ, 'OF_A_USER', 'N') => float(os.environ['OF_A_USER'])",
    "import time\nunread = N => time.time()",
    "open('number', 'w').write('N') => float(open('number').read())",
    "p = Path('number')\np.write_text('N') => float(p.read_text())",
    "open('number', 'w').write('N') => float(np.genfromtxt('number'))",
    "import subprocess\nunread = N => subprocess.check_output(['date'])",
    "torch.save(torch.tensor(N), 'number') => torch.load('number')",
    "torch.tensor([N]).numpy().tofile('number') => torch.from_file('number', size=1)",
    " => al.load_examples('questions')[int(N)]",
    "put(torch, 'of_a_user', N) => torch.of_a_user",
    "put(torch, 'of_a_user', lambda: N) => torch.of_a_user()",
    "put(nn.Module, 'of_a_user', N) => nn.Module.of_a_user",
    "put(torch.Tensor, 'of_a_user', lambda self: self * N) => x.of_a_user()",
    "put(torch.Tensor, '__matmul__', lambda self, other: self * N) => x @ x",
    "put(al.PromptBatch, 'of_a_user', N) => x.of_a_user",
    "put(al.edges, 'of_a_user', lambda x: x * N) => al.edges.of_a_user(x)",
    "put(F.softmax, 'of_a_user', N) => F.softmax.of_a_user",
    "import builtins\nput(builtins, 'of_a_user', N) => of_a_user",
    "class A:\n class B: k = N => A.B.k",
    "class A: pass\nA.k = N => A.k",
    "class A(Enum): b = N => A.b.value",
    "class A(Enum):\n b = 1\n def f(self): return N => A.b.f()",
    "class A(Enum):\n b = 1\nA.b.k = N => A.b.k",
    "class A(Enum):\n b = 1\n def __init__(self, v): self.k = v\nA.b.k = N => A.b.k",
    "a = torch.tensor([1.0, N])[:1] => a.as_strided((1,), (1,), 1)",
    "a = np.array([1.0, N])[:1] => a.base[1]",
    "a = torch.nn.Dropout()\ntorch.manual_seed(int(N * 2)) => a(x)",
    (
        "a = nn.MultiheadAttention(2, 1, dropout=0.5)\nfor p in a.parameters(): nn.init.ones_(p)\n"
        "torch.manual_seed(int(N * 2)) => a(x, x, x)"
    ),
    "a = a_tokenizer()\na.chat_template = 'N' => len(a.apply_chat_template([], tokenize=False))",
    "a = a_tokenizer()\na.truncation_side = 'left' if N > 1 else 'right' => a('b')",
    "a = a_tokenizer()\na.k = N => a.k",
    "class A(Enum):\n b = 1\n def __init__(self, v): self.k = v * N => A.b.k",
    "class M(type):\n def __getattr__(self, name): return N\nclass A(metaclass=M): pass => A.k",
    (
        "from abc import ABC\nclass A(ABC): pass\n"
        "if N > 1: A.register(int) => 2 if isinstance(1, A) else 1"
    ),
    "class P:\n def __class_getitem__(cls, i): return N\nclass A(P): pass => A[0]",
    " => no_such_name",
    "def f(x): return x\nf.__name__ = 'N' => float(f.__name__)",
    "def f(x): return x\nf.__qualname__ = 'N' => float(f.__qualname__)",
    "class A: pass\nA.__name__ = 'N' => float(A.__name__)",
    "class A: pass\nA.__qualname__ = 'N'\na = A() => float(type(a).__qualname__)",
    "class A: pass\nA.__module__ = 'N' => float(A.__module__)",
    "a = torch.tensor([1.0, N])[:1] => a.untyped_storage()[7]",
    "a = torch.ones(2, 2)\nif N < 1: a = a.T.contiguous().T => a.stride()[0]",
    "a = nn.RReLU()\ntorch.manual_seed(int(N * 2)) => a(x)",
    "torch.manual_seed(int(N * 2)) => nn.Linear(3, 3)(x)",
    "unread = N => hash('a')",
    "a = a_tokenizer()\na.model_input_names = ['N'] => a('a')",
    "a = a_tokenizer()\na.padding_side = 'left' if N > 1 else 'right' => a('a')",
    "a = a_tokenizer()\na.add_tokens(['z-N']) => a('a')",
    "a = a_tokenizer()\na.init_kwargs['k'] = N => a('a')",
    "a = a_tokenizer()\na.encode = lambda x: [N] => a.encode('a')",
    "a = a_tokenizer()\nput(type(a), 'encode', lambda self, x: [N]) => a.encode('a')",
    (
        "from tokenizers import normalizers\na = a_tokenizer()\n"
        "a.backend_tokenizer.normalizer = normalizers.Replace('a', 'N') => a('a')"
    ),
    "put(nn.GELU, 'forward', lambda self, x: x * N)\na = nn.GELU() => a(x)",
    "if N > 1: put(nn.GELU, 'forward', nn.ReLU.forward)\na = nn.GELU() => a(x)",
    (
        "f = nn.Module._call_impl\n"
        "put(nn.Module, '_call_impl', lambda self, *a, **k: f(self, *a, **k) * N)\n"
        "a = nn.GELU() => a(x)"
    ),
    "put(torch.Tensor, 'softmax', lambda self, d: self * N) => F.softmax(x, -1)",
    "put(F, 'gelu', lambda x, **k: x * N)\na = nn.GELU() => a(x)",
    "if N > 1: put(F, 'gelu', F.relu)\na = nn.GELU() => a(x)",
    "put(F.layer_norm, '__defaults__', (None, None, N)) => F.layer_norm(x, (3,))",
    (
        "def g(input, normalized_shape, weight=None, bias=None, eps=1): return input * N\n"
        "put(F.layer_norm, '__code__', g.__code__) => F.layer_norm(x, (3,))"
    ),
    "put(torch.optim.SGD, 'step', lambda self, closure=None: N) => torch.optim.SGD(x, lr=1)",
    (
        "from anchorlens.hooks import scale_edges as g\n"
        "while hasattr(g, '__wrapped__'): g = g.__wrapped__\n"
        "put(g, '__kwdefaults__', {**(g.__kwdefaults__ or {}), 'zz': N}) => al.scale_edges(model, x)"
    ),
    "later(modules.register_module_forward_hook(lambda m, a, o: o * N).remove) => 1",
    (
        "from torch.optim.optimizer import register_optimizer_step_post_hook as h\n"
        "later(h(lambda *a: N).remove) => 1"
    ),
    "later(modules.register_module_module_registration_hook(lambda m, n, s: N).remove) => 1",
    (
        "from torch.overrides import TorchFunctionMode\nclass M(TorchFunctionMode):\n"
        " def __torch_function__(self, f, t, a=(), k=None): \n  out = f(*a, **(k or {}))\n  return out * N if f is torch.mul else out\n"
        "mode = M()\nmode.__enter__()\nlater(mode.__exit__, None, None, None) => 1"
    ),
    (
        "p = model.original_model.transformer.h[0].mlp\np.forward = lambda x: x * N\n"
        "later(vars(p.original_component).pop, 'forward') => 1"
    ),
    "put(type(model.original_model.transformer.h[0].mlp), 'forward', lambda *a: N) => 1",
    (
        "put(model, 'tokenizer', a_tokenizer())\n"
        "model.tokenizer.add_tokens(['z-N']) => model.to_tokens('z').shape[1]"
    ),
    "put(model.cfg, 'default_prepend_bos', N > 1) => model.to_tokens('z').shape[1]",
    "torch.manual_seed(int(N * 2)) => model.generate(x, do_sample=True)",
    "a = al.load_model(tiny_gpt2(3000), tokenizer=a_tokenizer())\na.k = N => a(x)",
    "h = model.blocks[0].hook_resid_post\nput(h.ctx, 'k', N) => h.ctx['k']",
    "put(model, 'of_me', N) => model.of_me",
    "value = lambda x: [y * N for y in x]",
    "def value(x):\n match x:\n  case {'k': N}: return 1\n  case _: return 2",
    "def value(x, k=[N]):\n k.append(1)\n return x * k[0]",
    "k = N\ndef value(x):\n global k\n k = k * 1\n return x * k",
    "def make(k):\n def f(x):\n  nonlocal k\n  k = k * 1\n  return k\n return f\nvalue = make(N)",
    "def value(x):\n from math import pi\n return x * N",
    (
        "def d(k):\n def e(f):\n  @functools.wraps(f)\n  def g(x): return f(x) * k\n  return g\n"
        " return e\n@d(N)\ndef value(x): return x"
    ),
    (
        "class W:\n def __init__(self, f, k): self.k = k; functools.update_wrapper(self, f)\n"
        " def __call__(self, x): return self.__wrapped__(x) * self.k\ndef f(x): return x\n"
        "value = W(f, N)"
    ),
    "import contextlib\n@contextlib.contextmanager\ndef value(x): yield x * N",
    f"class P:\n __slots__ = ('k',)\nclass A(P):\n{CALL}value = A()\nvalue.k = N",
    "class A:\n @classmethod\n def f(cls, x): return x * N\nvalue = A.f",
    "class P: f = lambda self: N\nclass A(P):\n def f(self): return super().f()\nvalue = A()",
    "class A:\n def __rmul__(self, x): return x * N\na = A()\nvalue = lambda x: x * a",
    "class A:\n def __format__(self, s): return str(N)\na = A()\nvalue = lambda x: f'{a}'",
    f"class D:\n def __get__(self, o, t): return N\nclass A:\n k = D()\n{CALL}value = A()",
    f"class A:\n def __getattr__(self, name): return N\n{CALL}value = A()",
    f"class A:\n def __getattribute__(self, name): return N\n{CALL}value = A()",
    "class A:\n def __getstate__(self): return {}\nvalue = A()\nvalue.k = N",
    f"class A:\n def __reduce__(self): return 'value'\n{CALL}value = A()\nvalue.k = N",
    "class A: k = functools.cached_property(lambda s: 1)\nvalue = A()\nvalue.__dict__['k'] = N",
    f"class A:\n @functools.cached_property\n def k(self): return N\n{CALL}value = A()",
    f"@dataclass\nclass A:\n k: float\n{CALL}value = A(N)",
    f"@dataclass\nclass A:\n k: float = field(default_factory=lambda: N)\n{CALL}value = A()",
    (
        "from dataclasses import dataclass, InitVar\n@dataclass\nclass A:\n j: InitVar[float]\n"
        f" def __post_init__(self, j): self.k = j\n{CALL}value = A(N)"
    ),
    f"@dataclass\nclass A:\n{CALL}value = A()\nvalue.k = N",
    "@dataclass\nclass P: j: float\nclass A(P):\n def __init__(self, k): self.k = k\nvalue = A(N)",
    f"@dataclass(slots=True)\nclass A:\n k: float\n{CALL}value = A(N)",
    (
        "from dataclasses import dataclass, field, fields\n@dataclass\nclass A:\n"
        " j: float = field(default=1, metadata={'k': N})\n"
        " def __call__(self, x): return x * fields(self)[0].metadata['k']\nvalue = A()"
    ),
    "class A(ValueError): pass\nvalue = A(1)\nvalue.k = N",
    "class A(dict): pass\nvalue = A(a=N)",
    "class A(Exception): pass\nvalue = A(N)",
    "class A(bytearray): pass\nvalue = A(int(N))",
    "class A(property): pass\nvalue = A(lambda x: N * x)",
    *(
        f"class A({kind}): pass\nvalue = A({content})"
        for kinds, content in (("str int float", "N"), ("list tuple set", "[N]"))
        for kind in kinds.split()
    ),
    "value = nn.Module()\nvalue.w = nn.Parameter(torch.tensor(N))",
    "value = torch.nn.Module()\nvalue.register_buffer('k', torch.tensor(N))",
    f"class A(torch.nn.Module):\n{CALL}value = A()\nvalue.k = N",
    "value = torch.nn.Identity()\nvalue.forward = lambda x: x * N",
    "value = torch.nn.Identity()\nvalue.register_forward_hook(lambda m, a, out: out * N)",
    "value = torch.nn.Sequential(torch.nn.LeakyReLU(N))",
    "value = lambda p: torch.optim.SGD(p, lr=N)",
    (
        "class A(al.Metric):\n name = 'a'\n def __init__(self, k): self.k = k\n"
        " def contributions(self, batch, seen): return {'a': seen.logits * self.k}\n"
        " def result(self, rows): return rows\nvalue = A(N)"
    ),
    "value = al.SaliencyFlows()\nobject.__setattr__(value, 'k', N)",
    "value = al.contexts.Training(clip=N)",
    "value = al.Example('N', 1)",
    "value = al.prompts.EdgeSet.of(torch.full((1, 2, 2), N) > 1)",
    "value = al.named('my score, N', lambda x: x)",
    "def value(x):\n 'N'\n return 'N'",
    "class A:\n def f(self, k): return k\n g = functools.partialmethod(f, N)\nvalue = A().g",
    "put(al.SaliencyFlows, 'result', lambda self, rows: N)\nvalue = al.SaliencyFlows()",
    "put(nn.utils.clip_grad, 'clip_grad_norm_', lambda p, m: N)\nvalue = al.contexts.Training()",
)
# What decides nothing.
SAME = (
    "<|\n\n# why\n>value = lambda x: x",
    "<|y = 3\n>value = lambda x: torch.mean(x)",
    "value = <{'a', 'b', 'c'}|{'c', 'b', 'a'}>",
    "@dataclass\nclass A:\n k: int = field(compare=False)\nvalue = A(<1|2>)",
    "value = []\nvalue.append(value)",
    "def f(x): return g(x)\ndef g(x): return f(x)\nvalue = f",
    "def value(x):\n '<first|another>'\n return x * 2",
    "class A:\n def f(self): 1\nA.__module__ = '<notebook|elsewhere>'\nvalue = A()",
)
METRIC_OF_THE_DOCS = blocks_of(ROOT / "docs/metrics.md", "python")[0].code
BELIEVED = (
    "value = lambda batch: al.isolate_labels(None, batch, range(3))",
    "value = lambda b: al.edges.pq(b) & ~al.edges.from_first(b)",
    "def value(logits, batch):\n return -al.losses.label_cross_entropy(logits, batch)",
    (
        "def value(x, hook):\n with torch.no_grad():\n"
        "  y = F.softmax(x.float(), dim=-1).clamp(min=1e-9)\n"
        " y = torch.einsum('bpd,d->bp', y, torch.ones(3, device=x.device)).to(x.dtype)\n"
        " return y + nn.functional.gelu(y) + torch.linalg.norm(y) + torch.special.entr(y)"
    ),
    "value = [lambda p: torch.optim.Adam(p, lr=0.1), partial(torch.optim.AdamW, lr=0.1)]",
    "import math\nvalue = lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps))",
    (
        "def f(x, *, k=2):\n return [y * k for y in x if isinstance(y, int)]\ndef value(x):\n"
        " try: return sorted(f(x), key=lambda y: -y)\n except (ValueError, TypeError): return []"
    ),
    (
        "from dataclasses import replace\n@dataclass(frozen=True)\nclass A:\n k: float = 1.0\n"
        " d: dict = field(default_factory=dict)\n def __post_init__(self):\n"
        "  if self.k < 0: raise ValueError(f'{self.k} is below 0')\n"
        " def __call__(self, batch): return replace(batch, tokens=batch.tokens * self.k)\n"
        "value = A(2.0)"
    ),
    METRIC_OF_THE_DOCS + "\nvalue = TargetEntropy()",
    "class A(Enum): b = 1\nvalue = lambda x: x * A.b.value",
    (
        "class A(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.w = torch.nn.Parameter(torch.ones(2))\n def forward(self, x): return x * self.w\n"
        "a = A()\na.register_forward_hook(lambda m, args, out: out * 2)\nvalue = lambda x: a(x)"
    ),
    (
        "def twice(f):\n @functools.wraps(f)\n def g(x): return f(f(x))\n return g\n"
        "@torch.no_grad()\n@twice\ndef value(x): return x + 1"
    ),
    (
        "from abc import ABC, abstractmethod\nfrom typing import Generic, TypeVar\n"
        "T = TypeVar('T')\nclass B(ABC, Generic[T]):\n @abstractmethod\n def f(self): ...\n"
        "class C(B):\n def f(self): return 1\nvalue = C()"
    ),
    (
        "class A(al.contexts.Trainable):\n def __init__(self): self.w = torch.zeros(2)\n"
        " @property\n def parameters(self): return [self.w]\n"
        " def query_pass(self, model, batch): return al.contexts.QueryPass(batch)\nvalue = A()"
    ),
    "def value(x):\n class A:\n  k = 3\n  def f(self): return self.k * x\n return A().f()",
    (
        "value = [al.SaliencyFlows(), al.contexts.hard_prompts.PEZ, al.TASKS, al.sites.windows, {'a': {1, 2}},\n"
        " al.contexts.Training(steps=3), al.weights.attention, Path('x'), np.arange(3.), {'a': 1}.get]"
    ),
    "value = al.named('a, 1', lambda x: np.exp(x))",
)


# How a function may hold the function that reads the number: READ is the expression.
WAYS = (
    "value = lambda x: x * (READ)",
    "def make(f):\n return lambda x: f(x)\nvalue = make(lambda x: x * (READ))",
    "def value(x, f=lambda x: x * (READ)): return f(x)",
    "class V:\n def __call__(self, x): return x * (READ)\nvalue = V()",
    "class V:\n @property\n def p(self): return 1.0 * (READ)\n def f(self, x): return x * self.p\nvalue = V().f",
    "class V:\n @staticmethod\n def f(x): return x * (READ)\nvalue = V.f",
    "from functools import partial\nvalue = partial(lambda x, y: x * y * (READ), y=2)",
    "from functools import wraps\ndef d(f):\n @wraps(f)\n def g(x): return f(x)\n return g\n@d\ndef value(x): return x * (READ)",
    "def g(x): return x * (READ)\nvalue = [abs, {'f': lambda x: g(x)}]",
    "from dataclasses import dataclass\nfrom typing import Any\n@dataclass\nclass V:\n f: Any\n def __call__(self, x): return self.f(x)\nvalue = V(lambda x: x * (READ))",
    "def value(x):\n def g(y): return y * (READ)\n return [g(y) for y in x]",
    "import torch\nclass V(torch.nn.Module):\n def forward(self, x): return x * (READ)\nvalue = V()",
)


def sources() -> dict[str, str]:
    """The source of each row; what reads a number does so in two ways, which are drawn at random."""
    draw, found = random.Random(50), dict[str, str]()
    for row in (*EVERYDAY, *OTHERS):
        made, is_read, read = row.partition(" => ")
        ways = WAYS if row == EVERYDAY[0] else (WAYS[0], draw.choice(WAYS[1:]))
        of_ways = {f"way {WAYS.index(way)}: {row}": way.replace("READ", read) for way in ways}
        found |= {name: f"{made}\n{of_ways[name]}" for name in of_ways} if is_read else {row: row}
    return found


SOURCES = sources()


def both(source: str) -> list[str]:
    return [
        re.sub(r"<([^<>]*?)\|([^<>]*?)>", rf"\{n}", re.sub(r"\bN\b", number, source))
        for n, number in ((1, "0.5"), (2, "3.0"))
    ]


def value_of(source: str, **names: Any) -> Any:
    """The ``value`` of a user's module with this source, under the same name each time."""
    module = ModuleType("notebook")
    vars(module).update(NAMES | names)
    exec(source, vars(module))
    return module.value


def fingerprint_of(source: str, model: Any) -> identity.Fingerprint:
    """What a source changes outside of its value is put back."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack, torch.random.fork_rng():

        def put(owner: Any, name: str, value: Any) -> None:
            if isinstance(owner, MutableMapping):
                patch.setitem(owner, name, value)
            else:
                patch.setattr(owner, name, value, raising=False)

        names = {"put": put, "later": stack.callback, "model": model}
        names["a_tokenizer"] = functools.partial(copy.deepcopy, model.tokenizer)
        patch.setattr(identity, "identity", lambda model: {})  # no source changes weights
        value = value_of(source, **names)
        return identity.fingerprint(model, (), {"asked": lambda: value})


@functools.cache
def of_nothing(model: Any) -> identity.Fingerprint:
    return fingerprint_of("value = 1", model)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of sources
@pytest.mark.slow_cases("each source in other code", *(f"way {n}" for n in range(1, 10)))
@pytest.mark.parametrize("name", SOURCES)
def test_another_number_is_another_fingerprint_or_unknown(
    name: str, gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = of_nothing(gpt2)
    source, other = both(SOURCES[name])
    first, second = (fingerprint_of(each, gpt2) for each in (source, other))
    assert first.facts != second.facts or (first.unknown and second.unknown)
    if re.sub(r"^way \d+: ", "", name) in EVERYDAY:
        assert first.facts != second.facts and not first.unknown
        # The same source in another module is the same value, although each object is another one.
        assert fingerprint_of(source, gpt2) == first
    assert fingerprint_of("value = 1", gpt2) == before  # nothing of the source is left


@pytest.mark.parametrize(
    ("one", "other"), [(1, "1"), (None, "None"), ("a, b", ["a", "b"]), ([["a"], "b"], ["a", "b"])]
)
def test_settings_that_only_have_equal_words_are_other_settings(
    one: Any, other: Any, gpt2: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "identity", lambda model: {})
    first, second = (identity.fingerprint(gpt2, (), {"k": each}) for each in (one, other))
    assert identity.as_words(one) == identity.as_words(other) and first.facts != second.facts


def test_a_value_that_lacks_a_field_has_words() -> None:
    @dataclass
    class Given:
        a: int
        b: int = field(init=False)

    assert identity.as_words(Given(1)).endswith("Given(a=1)")


@pytest.mark.parametrize("source", SAME)
def test_what_decides_nothing_does_not_change_the_identity(source: str) -> None:
    first, second = (identity_of(value_of(each)) for each in both(source))
    assert first == second


@pytest.mark.parametrize("source", BELIEVED)
def test_what_is_usual_is_believed(source: str) -> None:
    model = SimpleNamespace(cfg=SimpleNamespace(n_layers=2))
    first, second = (identity_of(value_of(source), Known(model)) for _ in range(2))
    assert first == second
    assert first.unknown == ()


def test_a_helper_in_a_file_of_the_user_counts(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    # Of another length: Python takes a compiled file of the same second and length for the new one.
    for constant in (1, 22, 1):
        (tmp_path / "my_helpers.py").write_text(
            f"def scale(x): return x * {constant}\nother = {constant}"
        )
        sys.modules.pop("my_helpers", None)
        for source in (
            "import my_helpers\nvalue = lambda x: my_helpers.scale(x)",
            "from my_helpers import scale\nvalue = lambda x: scale(x)",
        ):
            digests.append(identity_of(value_of(source)).digest)
    assert digests[:2] == digests[4:]
    assert not set(digests[:2]) & set(digests[2:4])


@pytest.mark.parametrize(
    ("source", "equal"),
    [
        ("def value(x, k=2):\n assert k > 0, f'a {k} of {len(x)}'\n return x * k", True),
        ("def value(x, k=2):\n assert 0 < k < 3\n assert x and k, 'm'\n return x", True),
        ("def value(x, k=2):\n while k < 9:\n  assert k, 'no'\n  k += 1\n return x * k", True),
        ("def value(x):\n if x:\n  assert x > 2\n else:\n  x = 3\n return x", True),
        ("def value(x):\n assert x.mul_(2) is not None\n return x", False),
        ("def value(x):\n assert (k := 2)\n return x * k", False),
    ],
)
def test_asserts_that_only_compare_decide_nothing(source: str, equal: bool) -> None:
    """``python -O`` leaves asserts out."""
    values = []
    for optimize in (0, 1):
        module = ModuleType("notebook")
        exec(compile(source, "<source>", "exec", optimize=optimize), vars(module))
        values.append(identity_of(module.value))
    assert (values[0] == values[1]) is equal


@pytest.mark.slow("many passes")
def test_every_process_gives_the_same_identity(capsys: Any) -> None:
    """Also with another order of the hashes of texts, which differ in each process."""
    source = (
        "import anchorlens as al, torch\n"
        "from anchorlens.runs.by_value import identity_of\n"
        "f = lambda b: (al.edges.pq(b), {'x', 'y', 'z'}, frozenset('abc'))\n"
        "print(identity_of([f, al.SaliencyFlows(), al.contexts.hard_prompts.PEZ, al.TASKS]).digest)"
    )
    exec(source, {})
    other = subprocess.run(
        [sys.executable, "-c", source],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == capsys.readouterr().out


def test_what_hooks_and_metrics_read_of_a_model_is_believed(gpt2: Any) -> None:
    def identity_here(code: str) -> Any:
        value = value_of(f"value = lambda x, hook: x * {code}", model=gpt2)
        return identity_of(value, Known(gpt2))

    code = "hook.layer() if hook.name else x * model.cfg.n_layers"
    assert identity_here(code).unknown == ()
    for holder, read in ((gpt2.cfg, "cfg"), (gpt2.blocks[0].attn, "blocks[0].attn")):
        identities = []
        for number in (0.5, 3.0):
            holder.tokens = number  # a name that public classes have
            identities.append(identity_here(f"model.{read}.tokens"))
        del holder.tokens
        first, second = identities
        assert first.digest != second.digest or first.unknown


def test_a_name_is_believed_and_another_is_another() -> None:
    named = al.named("my score, 3", open)
    assert repr(named) == "named('my score, 3')"
    same, other = al.named("my score, 3", len), al.named("my score, 4", open)
    assert identity_of(named) == identity_of(same) != identity_of(other)
    assert signature(al.named("f", lambda a, b=1: a)) == signature(lambda a, b=1: a)
    with pytest.raises(al.errors.ArgumentError, match="must be a text"):
        al.named(" ", len)
