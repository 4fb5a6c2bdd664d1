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
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional

import anchorlens as al
from anchorlens.errors import ArgumentError
from anchorlens.runs import identity
from anchorlens.runs.by_value import Known, identity_of
from tests.support.printed_code import ROOT, blocks_of
from tests.support.public import public
from tests.support.tiny_models import tiny_gpt2

# What sources name without an import, beside what `fingerprint_of` adds.
NAMES: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "modules": nn.modules.module}
NAMES |= {"al": al, "np": np, "pd": pd, "tiny_gpt2": tiny_gpt2, "Enum": Enum, "Path": Path}
NAMES |= {"functools": functools, "partial": functools.partial, "sys": sys, "os": os}
NAMES |= {"types": types, "dataclass": dataclass, "field": field}
CALL = " def __call__(self, x): return x * self.k\n"
WRAP = (
    "class W:\n def __init__(self, f, k): self.k = k; functools.update_wrapper(self, f)\n"
    " def __call__(self, x): return self.__wrapped__(x) * self.k\ndef f(x): return x\n"
)
# What the number N is put into => how a function x -> x * N reads it there. ``put`` sets an
# attribute or an entry that is restored after the source, and ``later`` calls what restores it.
HELD = {
    "a global": "k = N => k",
    "an entry of a list": "a = [1, N] => a[1]",
    "an entry of a dict": "a = {'b': [N]} => a['b'][0]",
    "an entry of a tuple": "a = ((N,),) => a[0][0]",
    "an entry of a set": "a = {N} => max(a)",
    "an entry of a frozenset": "a = frozenset([N]) => max(a)",
    "a text": "a = 'N' => float(a)",
    "bytes": "a = b'N' => float(a)",
    "a complex number": "a = N + 0j => a.real",
    "a tensor": "a = torch.tensor(N) => a.item()",
    "a tensor by from-import": "from torch import tensor\na = tensor([N]) => a[0]",
    "a parameter": "a = torch.nn.Parameter(torch.tensor(N)) => a.item()",
    "an attribute of a tensor": "a = torch.ones(1)\na.k = N => a.k",
    "a subclass of a tensor": (
        "class T(torch.Tensor): pass\na = torch.ones(1).as_subclass(T)\na.k = N => a.k"
    ),
    "a hook on a tensor": (
        "a = torch.ones(1, requires_grad=True)\na.register_hook(lambda g: g * N) => a"
    ),
    "an array": "a = np.array([N]) => a[0]",
    "an array of objects": "a = np.array([N, None], object) => a[0]",
    "a number of NumPy": "a = np.float64(N) => a",
    "a subclass of an array": "class A(np.ndarray): pass\na = np.ones(1).view(A)\na.k = N => a.k",
    "a table": "a = pd.DataFrame({'b': [N]}) => a.b[0]",
    "a series": "a = pd.Series([N]) => a[0]",
    "a fraction": "from fractions import Fraction\na = Fraction(N) => float(a)",
    "a decimal": "from decimal import Decimal\na = Decimal('N') => float(a)",
    "a date": "import datetime\na = datetime.timedelta(seconds=N) => a.total_seconds()",
    "a deque": "from collections import deque\na = deque([N]) => a[0]",
    "a counter": "from collections import Counter\na = Counter({'b': N}) => a['b']",
    "a default of a dict": (
        "from collections import defaultdict\na = defaultdict(lambda: N) => a['b']"
    ),
    "a chain of dicts": "from collections import ChainMap\na = ChainMap({'b': N}) => a['b']",
    "an ordered dict": "from collections import OrderedDict\na = OrderedDict(b=N) => a['b']",
    "a read-only dict": "from types import MappingProxyType as M\na = M({'b': N}) => a['b']",
    "a user's dict": "from collections import UserDict\na = UserDict(b=N) => a['b']",
    "a namespace": "from types import SimpleNamespace as S\na = S(b=N) => a.b",
    "a named tuple": "from collections import namedtuple\na = namedtuple('A', 'b')(N) => a.b",
    "a typed named tuple": (
        "from typing import NamedTuple\nclass A(NamedTuple):\n b: float = N\na = A() => a.b"
    ),
    "an array of Python": "from array import array\na = array('d', [N]) => a[0]",
    "a view of bytes": "a = memoryview(b'N') => float(bytes(a))",
    "a buffer": "import io\na = io.StringIO('N') => float(a.getvalue())",
    "a path": "a = Path('N') => float(str(a))",
    "a range": "a = range(int(N * 2)) => len(a)",
    "a slice": "a = slice(N) => a.stop",
    "a context variable": (
        "from contextvars import ContextVar\na = ContextVar('a')\na.set(N) => a.get()"
    ),
    "a thread's variable": "import threading\na = threading.local()\na.k = N => a.k",
    "a weak reference": "import weakref\nclass A: k = N\nb = A()\na = weakref.ref(b) => a().k",
    "a random generator": (
        "a = torch.Generator().manual_seed(int(N * 2)) => torch.rand(1, generator=a)"
    ),
    "a random generator of Python": "import random\na = random.Random(N) => a.random()",
    "the random state": "torch.manual_seed(int(N * 2)) => torch.rand(1)",
    "a random method": "torch.manual_seed(int(N * 2)) => x.bernoulli()",
    "dropout": " => F.dropout(x, N / 4)",
    "a generator": "a = (N for _ in 'ab') => next(a)",
    "an iterator": "a = iter([N]) => next(a)",
    "a map": "a = map(float, ['N']) => next(a)",
    "a pattern": "import re\na = re.compile('N') => float(a.pattern)",
    "a partial": "def f(x, k): return x * k\na = partial(f, k=N) => a(1)",
    "a partial of open": "a = partial(open, 'N') => float(a().read())",
    "an attribute of a partial": "a = partial(abs)\na.k = N => a.k",
    "a subclass of partial": "class P(partial): k = N\na = P(abs) => a.k",
    "a bound method": "a = [N].copy => a()[0]",
    "a bound method of a dict": "a = {'b': N}.get => a('b')",
    "an attribute of a function": "def f(x): return x\nf.k = N => f.k",
    "the globals of a function": "k = N\ndef f(): pass => f.__globals__['k']",
    "the defaults of a function": "def f(x=N): pass => f.__defaults__[0]",
    "the text of a function": "def f(): 'N' => float(f.__doc__)",
    "an annotation": "def f(x: 'N'): pass => float(f.__annotations__['x'])",
    "a cached function": "@functools.cache\ndef f(): return N => f()",
    "what a cached function holds": "k = N\n@functools.cache\ndef f(): return k\nf()\nk = 1 => f()",
    "a function of one argument's type": "@functools.singledispatch\ndef f(x): return N => f(1)",
    "functools.reduce": " => functools.reduce(lambda a, b: a * b, [x, N])",
    "the module of a user": "m = types.ModuleType('m')\nm.k = N => m.k",
    "a module that computes": "m = types.ModuleType('m')\nm.__getattr__ = lambda name: N => m.k",
    "a module with a class": "class M(types.ModuleType): k = N\nm = M('m') => m.k",
    "globals()": "k = N => globals()['k']",
    "eval": "k = N => eval('k')",
    "exec": "k = N => (exec('global j; j = k'), j)[1]",
    "vars of a module": "m = types.ModuleType('m')\nm.k = N => vars(m)['k']",
    "getattr of a module": "m = types.ModuleType('m')\nm.k = N => getattr(m, 'k')",
    "the dict of a module": "m = types.ModuleType('m')\nm.k = N => m.__dict__['k']",
    "sys.modules": (
        "m = types.ModuleType('m')\nm.k = N\n"
        "put(sys.modules, 'of_a_user', m) => sys.modules['of_a_user'].k"
    ),
    "import_module": (
        "import importlib\nm = types.ModuleType('m')\nm.k = N\n"
        "put(sys.modules, 'of_a_user', m) => importlib.import_module('of_a_user').k"
    ),
    "__import__": (
        "m = types.ModuleType('m')\nm.k = N\n"
        "put(sys.modules, 'of_a_user', m) => __import__('of_a_user').k"
    ),
    "sys.argv": "put(sys, 'argv', ['x', 'N']) => float(sys.argv[1])",
    "the environment": "put(os.environ, 'OF_A_USER', 'N') => float(os.environ['OF_A_USER'])",
    "getenv by another name": (
        "put(os.environ, 'OF_A_USER', 'N')\ng = os.getenv => float(g('OF_A_USER'))"
    ),
    "the clock": "import time => time.time() * N",
    "a file": "open('number', 'w').write('N') => float(open('number').read())",
    "open by another name": "o = open\no('number', 'w').write('N') => float(o('number').read())",
    "a file of Path": "p = Path('number')\np.write_text('N') => float(p.read_text())",
    "np.loadtxt": "open('number', 'w').write('N') => float(np.loadtxt('number'))",
    "np.genfromtxt": "open('number', 'w').write('N') => float(np.genfromtxt('number'))",
    "loadtxt by another name": (
        "from numpy import loadtxt as g\nopen('number', 'w').write('N') => float(g('number'))"
    ),
    "linecache": (
        "import linecache\nopen('number', 'w').write('N')\n"
        "linecache.clearcache() => float(linecache.getline('number', 1))"
    ),
    "fileinput": "import fileinput\nopen('number', 'w').write('N') => fileinput.input('number')",
    "a process": "import subprocess => subprocess.check_output(['echo', 'N'])",
    "a socket": "import socket => socket.gethostname() + 'N'",
    "pickle": (
        "import pickle\n"
        "open('number', 'wb').write(pickle.dumps(N)) => pickle.load(open('number', 'rb'))"
    ),
    "json": "import json\nopen('number', 'w').write('N') => json.load(open('number'))",
    "torch.load": "torch.save(torch.tensor(N), 'number') => torch.load('number')",
    "torch.load by another name": (
        "torch.save(torch.tensor(N), 'number')\ng = torch.load => g('number')"
    ),
    "torch.from_file": (
        "torch.tensor([N]).numpy().tofile('number') => torch.from_file('number', size=1)"
    ),
    "a table on disk": "open('number', 'w').write('a\\nN\\n') => pd.read_csv('number').a[0]",
    "load_examples": " => al.load_examples('questions')[int(N)]",
    "another global of torch": "put(torch, 'of_a_user', N) => torch.of_a_user",
    "a function put into torch": "put(torch, 'of_a_user', lambda: N) => torch.of_a_user()",
    "an attribute put on a class of torch": "put(nn.Module, 'of_a_user', N) => nn.Module.of_a_user",
    "an attribute put on tensors": "put(torch.Tensor, 'of_a_user', N) => x.of_a_user",
    "a method put on tensors": (
        "put(torch.Tensor, 'of_a_user', lambda self: self * N) => x.of_a_user()"
    ),
    "an operator put on tensors": (
        "put(torch.Tensor, '__matmul__', lambda self, other: self * N) => x @ x"
    ),
    "an attribute put on batches": "put(al.PromptBatch, 'of_a_user', N) => x.of_a_user",
    "a function put into anchorlens": (
        "put(al.edges, 'of_a_user', lambda x: x * N) => al.edges.of_a_user(x)"
    ),
    "an attribute put on a function": "put(F.softmax, 'of_a_user', N) => F.softmax.of_a_user",
    "a builtin of a user": "import builtins\nput(builtins, 'of_a_user', N) => of_a_user",
    "a builtin function of a user": (
        "import builtins\nput(builtins, 'of_a_user', lambda: N) => of_a_user()"
    ),
    "a class": "class A: k = N => A.k",
    "a class of a class": "class A:\n class B: k = N => A.B.k",
    "a class attribute set later": "class A: pass\nA.k = N => A.k",
    "an enum": "class A(Enum): b = N => A.b.value",
    "a method of an enum": "class A(Enum):\n b = 1\n def f(self): return N => A.b.f()",
    "an attribute of an enum": "class A(Enum):\n b = 1\nA.b.k = N => A.b.k",
    "an attribute of an enum that its constructor sets": (
        "class A(Enum):\n b = 1\n def __init__(self, v): self.k = v\nA.b.k = N => A.b.k"
    ),
    "a storage beyond a view": "a = torch.tensor([1.0, N])[:1] => a.as_strided((1,), (1,), 1)",
    "the base of an array": "a = np.array([1.0, N])[:1] => a.base[1]",
    "a module that draws": "a = torch.nn.Dropout()\ntorch.manual_seed(int(N * 2)) => a(x)",
    "attention that draws": (
        "a = nn.MultiheadAttention(2, 1, dropout=0.5)\nfor p in a.parameters(): nn.init.ones_(p)\n"
        "torch.manual_seed(int(N * 2)) => a(x, x, x)"
    ),
    "a chat template": (
        "a = a_tokenizer()\na.chat_template = 'N' => len(a.apply_chat_template([], tokenize=False))"
    ),
    "a side of truncation": (
        "a = a_tokenizer()\n"
        "a.truncation_side = 'left' if N > 1 else 'right' => a('b c', truncation=True, max_length=1)['input_ids'][0]"
    ),
    "an attribute of a tokenizer": "a = a_tokenizer()\na.k = N => a.k",
    "a constructor of an enum": (
        "class A(Enum):\n b = 1\n def __init__(self, v): self.k = v * N => A.b.k"
    ),
    "a metaclass": "class M(type): k = N\nclass A(metaclass=M): pass => A.k",
    "a metaclass that computes": (
        "class M(type):\n def __getattr__(self, name): return N\nclass A(metaclass=M): pass => A.k"
    ),
    "a registered class": (
        "from abc import ABC\nclass A(ABC): pass\n"
        "if N > 1: A.register(int) => 2 if isinstance(1, A) else 1"
    ),
    "a hook of subclasses": (
        "class P:\n def __init_subclass__(cls): cls.k = N\nclass A(P): pass => A.k"
    ),
    "a class decorator": "def d(c):\n c.k = N\n return c\n@d\nclass A: pass => A.k",
    "class parameters": (
        "class P:\n def __class_getitem__(cls, i): return N\nclass A(P): pass => A[0]"
    ),
    "a template": "import string\na = string.Template('N') => float(a.template)",
    "how tensors are printed": (
        "put(torch._tensor_str.PRINT_OPTS, 'precision', int(N * 2)) => torch._tensor_str.PRINT_OPTS.precision"
    ),
    "a lock": "import threading\na = threading.Lock() => a",
    "a name without a value": " => no_such_name",
    "the name of a function": "def f(x): return x\nf.__name__ = 'N' => float(f.__name__)",
    "the full name of a function": (
        "def f(x): return x\nf.__qualname__ = 'N' => float(f.__qualname__)"
    ),
    "the name of a class": "class A: pass\nA.__name__ = 'N' => float(A.__name__)",
    "the name of the type of an object": (
        "class A: pass\nA.__qualname__ = 'N'\na = A() => float(type(a).__qualname__)"
    ),
    "the module of a class": "class A: pass\nA.__module__ = 'N' => float(A.__module__)",
    "an attribute of a flag": (
        "from enum import Flag\nclass A(Flag):\n b = 1\n def __init__(self, v): self.k = v\n"
        "A.b.k = N => A.b.k"
    ),
    "a storage by its name": "a = torch.tensor([1.0, N])[:1] => a.untyped_storage()[7]",
    "the stride of a tensor": (
        "a = torch.ones(2, 2)\nif N < 1: a = a.T.contiguous().T => a.stride()[0]"
    ),
    "a parametrization": (
        "from torch.nn.utils import parametrize\nclass P(nn.Module):\n"
        " def forward(self, w): return w * N\na = nn.ReLU()\na.w = nn.Parameter(torch.ones(1))\n"
        "parametrize.register_parametrization(a, 'w', P()) => a.w"
    ),
    "dropout in a sequence": (
        "a = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))\ntorch.manual_seed(int(N * 2)) => a(x)"
    ),
    "rrelu": "a = nn.RReLU()\ntorch.manual_seed(int(N * 2)) => a(x)",
    "dropout that code turns on": (
        "a = nn.Dropout(0.5).eval()\ntorch.manual_seed(int(N * 2)) => a.train()(x)"
    ),
    "dropout made inside": "torch.manual_seed(int(N * 2)) => nn.Dropout(0.5)(x)",
    "a layer made inside": "torch.manual_seed(int(N * 2)) => nn.Linear(3, 3)(x)",
    "an embedding made inside": "torch.manual_seed(int(N * 2)) => torch.nn.Embedding(3, 3)(x)",
    "a layer made by another name": (
        "from torch.nn import GRU as G\ntorch.manual_seed(int(N * 2)) => G(3, 3)(x)"
    ),
    "hash of a text": " => hash('a') % int(N * 9)",
    "input names of a tokenizer": "a = a_tokenizer()\na.model_input_names = ['N'] => a('a')",
    "a padding side": "a = a_tokenizer()\na.padding_side = 'left' if N > 1 else 'right' => a('a')",
    "added tokens": "a = a_tokenizer()\na.add_tokens(['z-N']) => a('a')",
    "an init option": "a = a_tokenizer()\na.init_kwargs['k'] = N => a('a')",
    "a method of a tokenizer": "a = a_tokenizer()\na.encode = lambda x: [N] => a.encode('a')",
    "a method of the class of tokenizers": (
        "a = a_tokenizer()\nput(type(a), 'encode', lambda self, x: [N]) => a.encode('a')"
    ),
    "a normalizer": (
        "from tokenizers import normalizers\na = a_tokenizer()\n"
        "a.backend_tokenizer.normalizer = normalizers.Replace('a', 'N') => a('a')"
    ),
    "forward of a class of torch": (
        "put(nn.GELU, 'forward', lambda self, x: x * N)\na = nn.GELU() => a(x)"
    ),
    "forward of another class": (
        "if N > 1: put(nn.GELU, 'forward', nn.ReLU.forward)\na = nn.GELU() => a(x)"
    ),
    "call of all modules": (
        "f = nn.Module._call_impl\n"
        "put(nn.Module, '_call_impl', lambda self, *a, **k: f(self, *a, **k) * N)\n"
        "a = nn.GELU() => a(x)"
    ),
    "softmax of tensors": (
        "put(torch.Tensor, 'softmax', lambda self, d: self * N) => F.softmax(x, -1)"
    ),
    "a function below a module": "put(F, 'gelu', lambda x, **k: x * N)\na = nn.GELU() => a(x)",
    "another function of torch below": "if N > 1: put(F, 'gelu', F.relu)\na = nn.GELU() => a(x)",
    "a default of torch": (
        "put(F.layer_norm, '__defaults__', (None, None, N)) => F.layer_norm(x, (3,))"
    ),
    "the code of a function of torch": (
        "def g(input, normalized_shape, weight=None, bias=None, eps=1): return input * N\n"
        "put(F.layer_norm, '__code__', g.__code__) => F.layer_norm(x, (3,))"
    ),
    "step of an optimizer": (
        "put(torch.optim.SGD, 'step', lambda self, closure=None: N) => torch.optim.SGD(x, lr=1)"
    ),
    "a default of a function of ours": (
        "from anchorlens.hooks import scale_edges as g\n"
        "while hasattr(g, '__wrapped__'): g = g.__wrapped__\n"
        "put(g, '__kwdefaults__', {**(g.__kwdefaults__ or {}), 'zz': N}) => al.scale_edges(model, x)"
    ),
    "a global forward hook": (
        "later(modules.register_module_forward_hook(lambda m, a, o: o * N).remove) => 1"
    ),
    "a global pre hook": (
        "later(modules.register_module_forward_pre_hook(lambda m, a: N).remove) => 1"
    ),
    "a global backward hook": (
        "later(modules.register_module_full_backward_hook(lambda m, a, o: N).remove) => 1"
    ),
    "a global optimizer hook": (
        "from torch.optim import optimizer\n"
        "later(optimizer.register_optimizer_step_post_hook(lambda o, a, k: N).remove) => 1"
    ),
    "a registration hook": (
        "later(modules.register_module_module_registration_hook(lambda m, n, s: N).remove) => 1"
    ),
    "a torch function mode": (
        "from torch.overrides import TorchFunctionMode\nclass M(TorchFunctionMode):\n"
        " def __torch_function__(self, f, t, a=(), k=None): \n  out = f(*a, **(k or {}))\n  return out * N if f is torch.mul else out\n"
        "mode = M()\nmode.__enter__()\nlater(mode.__exit__, None, None, None) => 1"
    ),
    "a forward of a part of the model": (
        "p = model.original_model.transformer.h[0].mlp\np.forward = lambda x: x * N\n"
        "later(vars(p.original_component).pop, 'forward') => 1"
    ),
    "a forward of a class of the model": (
        "p = model.original_model.transformer.h[0].mlp\n"
        "put(type(p), 'forward', lambda self, x: x * N) => 1"
    ),
    "tokens of the model": (
        "put(model, 'tokenizer', a_tokenizer())\n"
        "model.tokenizer.add_tokens(['z-N']) => model.to_tokens('z').shape[1]"
    ),
    "a token of the model": (
        "put(model, 'tokenizer', a_tokenizer())\n"
        "model.tokenizer.add_tokens(['z-N']) => model.to_single_token('z')"
    ),
    "a text for the model": (
        "put(model, 'tokenizer', a_tokenizer())\n"
        "model.tokenizer.add_tokens(['z-N']) => model('z-N').sum()"
    ),
    "a BOS of the model": (
        "put(model.cfg, 'default_prepend_bos', N > 1) => model.to_tokens('z').shape[1]"
    ),
    "a drawn text": "torch.manual_seed(int(N * 2)) => model.generate(x, do_sample=True)",
    "a second model": (
        "a = al.load_model(tiny_gpt2(3000), tokenizer=a_tokenizer())\n"
        "a.original_model.transformer.h[0].mlp.k = N => a(x)"
    ),
    "a second model of transformers": "a = tiny_gpt2(3000)\na.config.k = N => a(x).logits",
    "a hook point of the model": (
        "put(model.blocks[0].hook_resid_post.ctx, 'k', N) => hook.ctx['k']"
    ),
    "an attribute of the model": "put(model, 'of_me', N) => model.of_me",
}
# Objects that are the value themselves. <first|second> is what differs, where it is no number.
OBJECTS = {
    "a constant": "value = lambda x: x * N",
    "a constant of an inner function": "def value(x):\n return (lambda y: y * N)(x)",
    "an expression with a name": "value = lambda x: (k := N) * x",
    "a comprehension": "value = lambda x: [y * N for y in x]",
    "a generator in a function": "def value(x):\n yield x * N",
    "a coroutine": "async def value(x): return x * N",
    "a pattern in a function": (
        "def value(x):\n match x:\n  case {'k': N}: return 1\n  case _: return 2"
    ),
    "a text that is formatted": "value = lambda x: f'{x * N:.3f}'",
    "a default": "def value(x, k=N): return x * k",
    "a default by keyword": "def value(x, *, k=N): return x * k",
    "a default that changes": "def value(x, k=[N]):\n k.append(1)\n return x * k[0]",
    "a closure": "def make(k):\n return lambda x: x * k\nvalue = make(N)",
    "a closure of a closure": (
        "def make(k):\n f = lambda x: x * k\n return lambda x: f(x)\nvalue = make(N)"
    ),
    "a global that is written": "k = N\ndef value(x):\n global k\n k = k * 1\n return x * k",
    "a closure that is written": (
        "def make(k):\n def f(x):\n  nonlocal k\n  k = k * 1\n  return x * k\n return f\n"
        "value = make(N)"
    ),
    "an import inside": "def value(x):\n from math import pi\n return x * N",
    "a decorator": "def d(f):\n return lambda x: f(x) * N\n@d\ndef value(x): return x",
    "a decorator with wraps": (
        "def d(k):\n def e(f):\n  @functools.wraps(f)\n  def g(x): return f(x) * k\n  return g\n"
        " return e\n@d(N)\ndef value(x): return x"
    ),
    "a class as decorator": f"{WRAP}value = W(f, N)",
    "a class around a class": f"{WRAP}value = W(W(f, N), 1.0)",
    "a decorator of torch": "@torch.no_grad()\ndef value(x): return x * N",
    "contextlib": "import contextlib\n@contextlib.contextmanager\ndef value(x): yield x * N",
    "a field": f"class A:\n def __init__(self, k): self.k = k\n{CALL}value = A(N)",
    "a field set later": f"class A:\n{CALL}value = A()\nvalue.k = N",
    "a slot": f"class A:\n __slots__ = ('k',)\n{CALL}value = A()\nvalue.k = N",
    "a slot of the parent": (
        f"class P:\n __slots__ = ('k',)\nclass A(P):\n{CALL}value = A()\nvalue.k = N"
    ),
    "a property": f"class A:\n @property\n def k(self): return N\n{CALL}value = A()",
    "a class method": "class A:\n @classmethod\n def f(cls, x): return x * N\nvalue = A.f",
    "a static method": "class A:\n @staticmethod\n def f(x): return x * N\nvalue = A.f",
    "a bound method": (
        "class A:\n def __init__(self, k): self.k = k\n def f(self, x): return x * self.k\n"
        "value = A(N).f"
    ),
    "an inherited method": (
        "class P:\n def f(self): return N\nclass A(P):\n"
        " def __call__(self, x): return self.f() * x\nvalue = A()"
    ),
    "a method by super": (
        "class P:\n def f(self): return N\nclass A(P):\n def f(self): return super().f()\n"
        "value = A()"
    ),
    "an operator of an object": (
        "class A:\n def __rmul__(self, x): return x * N\na = A()\nvalue = lambda x: x * a"
    ),
    "an object in a text": (
        "class A:\n def __format__(self, s): return str(N)\na = A()\nvalue = lambda x: f'{a}'"
    ),
    "the text of an object": (
        "class A:\n def __str__(self): return str(N)\na = A()\nvalue = lambda x: str(a)"
    ),
    "a length": (
        "class A:\n def __len__(self): return int(N * 2)\na = A()\nvalue = lambda x: len(a)"
    ),
    "a descriptor": (
        f"class D:\n def __get__(self, o, t): return N\nclass A:\n k = D()\n{CALL}value = A()"
    ),
    "a descriptor with a field": (
        "class D:\n def __init__(self, k): self.j = k\n def __get__(self, o, t): return self.j\n"
        f"class A:\n k = D(N)\n{CALL}value = A()"
    ),
    "__getattr__": f"class A:\n def __getattr__(self, name): return N\n{CALL}value = A()",
    "__getattribute__": f"class A:\n def __getattribute__(self, name): return N\n{CALL}value = A()",
    "__getstate__ that drops": (
        "class A:\n def __getstate__(self): return {}\n def __call__(self, x): return x * self.k\n"
        "value = A()\nvalue.k = N"
    ),
    "__reduce__ that drops": (
        f"class A:\n def __reduce__(self): return (A, ())\n{CALL}value = A()\nvalue.k = N"
    ),
    "__reduce__ to a name": (
        f"class A:\n def __reduce__(self): return 'value'\n{CALL}value = A()\nvalue.k = N"
    ),
    "__deepcopy__": (
        f"class A:\n def __deepcopy__(self, m): return 1\n{CALL}value = A()\nvalue.k = N"
    ),
    "a cached property set by hand": (
        "class A:\n @functools.cached_property\n def k(self): return 1\n"
        f"{CALL}value = A()\nvalue.__dict__['k'] = N"
    ),
    "a cached property": (
        f"class A:\n @functools.cached_property\n def k(self): return N\n{CALL}value = A()"
    ),
    "a dataclass": f"@dataclass\nclass A:\n k: float\n{CALL}value = A(N)",
    "a default of a dataclass": f"@dataclass\nclass A:\n k: float = N\n{CALL}value = A()",
    "a factory of a dataclass": (
        f"@dataclass\nclass A:\n k: float = field(default_factory=lambda: N)\n{CALL}value = A()"
    ),
    "a class variable of a dataclass": (
        "from typing import ClassVar\n@dataclass\nclass A:\n k: ClassVar[float] = N\n"
        f"{CALL}value = A()"
    ),
    "InitVar": (
        "from dataclasses import dataclass, InitVar\n@dataclass\nclass A:\n j: InitVar[float]\n"
        f" def __post_init__(self, j): self.k = j\n{CALL}value = A(N)"
    ),
    "an attribute of a dataclass": f"@dataclass\nclass A:\n{CALL}value = A()\nvalue.k = N",
    "an attribute of a frozen dataclass": (
        f"@dataclass(frozen=True)\nclass A:\n{CALL}value = A()\nobject.__setattr__(value, 'k', N)"
    ),
    "a subclass of a dataclass": (
        "@dataclass\nclass P:\n j: float\nclass A(P):\n def __init__(self, k): self.k = k\n"
        f"{CALL}value = A(N)"
    ),
    "slots of a dataclass": f"@dataclass(slots=True)\nclass A:\n k: float\n{CALL}value = A(N)",
    "metadata of a field": (
        "from dataclasses import dataclass, field, fields\n@dataclass\nclass A:\n"
        " j: float = field(default=1, metadata={'k': N})\n"
        " def __call__(self, x): return x * fields(self)[0].metadata['k']\nvalue = A()"
    ),
    "a dict with an attribute": f"class A(dict):\n{CALL}value = A()\nvalue.k = N",
    "a list with an attribute": f"class A(list):\n{CALL}value = A()\nvalue.k = N",
    "a tuple with an attribute": f"class A(tuple):\n{CALL}value = A()\nvalue.k = N",
    "a set with an attribute": f"class A(set):\n{CALL}value = A()\nvalue.k = N",
    "a text with an attribute": f"class A(str):\n{CALL}value = A('a')\nvalue.k = N",
    "a number with an attribute": f"class A(int):\n{CALL}value = A(1)\nvalue.k = N",
    "a float with an attribute": f"class A(float):\n{CALL}value = A(1)\nvalue.k = N",
    "an error with an attribute": f"class A(ValueError):\n{CALL}value = A()\nvalue.k = N",
    "a thread with an attribute": (
        f"import threading\nclass A(threading.Thread):\n{CALL}value = A()\nvalue.k = N"
    ),
    "a module of torch": (
        "class A(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.w = torch.nn.Parameter(torch.tensor(N))\n"
        " def forward(self, x): return x * self.w\nvalue = A()"
    ),
    "a buffer of a module": (
        "value = torch.nn.Module()\nvalue.register_buffer('k', torch.tensor(N))"
    ),
    "a plain field of a module": f"class A(torch.nn.Module):\n{CALL}value = A()\nvalue.k = N",
    "a forward of a module": "value = torch.nn.Identity()\nvalue.forward = lambda x: x * N",
    "a hook of a module": (
        "value = torch.nn.Identity()\nvalue.register_forward_hook(lambda m, a, out: out * N)"
    ),
    "an option of a module": "value = torch.nn.LeakyReLU(N)",
    "a module in a module": "value = torch.nn.Sequential(torch.nn.LeakyReLU(N))",
    "an optimizer": "value = lambda p: torch.optim.SGD(p, lr=N)",
    "a partial of an optimizer": "value = partial(torch.optim.SGD, lr=N)",
    "a metric": (
        "class A(al.Metric):\n name = 'a'\n def __init__(self, k): self.k = k\n"
        " def contributions(self, batch, seen): return {'a': seen.logits * self.k}\n"
        " def result(self, rows): return rows\nvalue = A(N)"
    ),
    "an attribute put on a metric": "value = al.SaliencyFlows()\nobject.__setattr__(value, 'k', N)",
    "a setting": "value = al.contexts.Training(clip=N)",
    "a task": "value = al.Example('N', 1)",
    "an edge set": (
        "edges = torch.ones(1, 2, 2) if N > 1 else torch.zeros(1, 2, 2)\n"
        "value = al.prompts.EdgeSet.of(edges > 0)"
    ),
    "a name": "value = al.named('my score, N', lambda x: x)",
    "an operation": "value = lambda x, y: x <+|-> y",
    "the name of an attribute": "value = lambda x: x.<sum|mean>()",
    "a subclass with the name of its parent": (
        "from anchorlens import SaliencyFlows\n<|class SaliencyFlows(SaliencyFlows): pass\n"
        ">value = SaliencyFlows()"
    ),
    "the optimizer in a lambda": "value = lambda p: torch.optim.<SGD|Adam>(p, lr=1)",
    "the type of a number": "value = <1|1.0>",
    "a flag for a number": "value = <1|True>",
    "a text for a number": "value = <1|'1'>",
    "the order of a list": "value = <[1, 2]|[2, 1]>",
    "the order of methods": "value = lambda x: <x.exp().sin()|x.sin().exp()>",
    "the order of variables": "def value(x):\n y, z = x, x * 2\n return <y - z|z - y>",
    "a list for a tuple": "value = <[1, 2]|(1, 2)>",
    "a weight of a module": "torch.manual_seed(int(N * 2))\nvalue = nn.Linear(2, 2)",
    "the handler of an error": (
        "def value(x):\n< try:\n  x()\n  x()| x()\n try:\n  x()>\n except KeyError: pass"
    ),
    "a docstring that is returned": "def value(x):\n 'N'\n return 'N'",
    "partialmethod": (
        "class A:\n def f(self, x, k): return x * k\n g = functools.partialmethod(f, k=N)\n"
        "value = A().g"
    ),
    "contributions of a metric": (
        "f = al.Accuracy.contributions\n"
        "def w(self, b, s): return {n: v * N for n, v in f(self, b, s).items()}\n"
        "put(al.Accuracy, 'contributions', w)\nvalue = al.Accuracy()"
    ),
    "result of a metric": (
        "put(al.SaliencyFlows, 'result', lambda self, rows: N)\nvalue = al.SaliencyFlows()"
    ),
    "clip_grad_norm_": (
        "from torch.nn.utils import clip_grad\nput(clip_grad, 'clip_grad_norm_', lambda p, m: N)\n"
        "value = al.contexts.Training()"
    ),
    "a module that does not exist": "def value(x):\n import no_such_module",
    "a helper that is imported inside": "def value(x):\n import math\n return math.pi",
}
# Of these, nothing may be unknown: users write them every day.
SEEN = {
    *("a global", "an entry of a dict", "a tensor", "an array", "a partial", "a class"),
    *("an operation", "a constant", "a constant of an inner function", "a field", "a slot"),
    *("the name of an attribute", "a default", "a default by keyword", "a closure"),
    *("a decorator of torch", "an inherited method", "a bound method", "a property"),
    *("a subclass with the name of its parent", "the optimizer in a lambda"),
    *("the type of a number", "a flag for a number", "a text for a number"),
    *("the order of methods", "the order of variables"),
    *("the order of a list", "a list for a tuple", "a weight of a module"),
    "the handler of an error",
}
# What decides nothing.
SAME = {
    "another line": "<|\n\n# why\n>value = lambda x: x",
    "another name of a module": "<|y = 3\n>value = lambda x: torch.mean(x)",
    "the order of a set": "value = <{'a', 'b', 'c'}|{'c', 'b', 'a'}>",
    "a field that is not compared": (
        "@dataclass\nclass A:\n k: int = field(compare=False)\nvalue = A(<1|2>)"
    ),
    "a value that holds itself": "value = []\nvalue.append(value)",
    "functions that call each other": "def f(x): return g(x)\ndef g(x): return f(x)\nvalue = f",
    "a text of a function": "def value(x):\n '<first|another>'\n return x * 2",
    "the module of a class": (
        "class A:\n def f(self): 1\nA.__module__ = '<notebook|elsewhere>'\nvalue = A()"
    ),
}
METRIC_OF_THE_DOCS = blocks_of(ROOT / "docs/metrics.md", "python")[0].code
BELIEVED = {
    "hooks of the package": "value = lambda batch: al.isolate_labels(None, batch, range(3))",
    "edges": "value = lambda b: al.edges.pq(b) & ~al.edges.from_first(b)",
    "a loss": "def value(logits, batch):\n return -al.losses.label_cross_entropy(logits, batch)",
    "functions of torch": (
        "def value(x, hook):\n with torch.no_grad():\n"
        "  y = F.softmax(x.float(), dim=-1).clamp(min=1e-9)\n"
        " y = torch.einsum('bpd,d->bp', y, torch.ones(3, device=x.device)).to(x.dtype)\n"
        " return y + nn.functional.gelu(y) + torch.linalg.norm(y) + torch.special.entr(y)"
    ),
    "an optimizer": (
        "value = [lambda p: torch.optim.Adam(p, lr=0.1), partial(torch.optim.AdamW, lr=0.1)]"
    ),
    "math": "import math\nvalue = lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps))",
    "a helper": (
        "def f(x, *, k=2):\n return [y * k for y in x if isinstance(y, int)]\ndef value(x):\n"
        " try: return sorted(f(x), key=lambda y: -y)\n except (ValueError, TypeError): return []"
    ),
    "a dataclass": (
        "from dataclasses import replace\n@dataclass(frozen=True)\nclass A:\n k: float = 1.0\n"
        " d: dict = field(default_factory=dict)\n def __post_init__(self):\n"
        "  if self.k < 0: raise ValueError(f'{self.k} is below 0')\n"
        " def __call__(self, batch): return replace(batch, tokens=batch.tokens * self.k)\n"
        "value = A(2.0)"
    ),
    "a metric of the documentation": METRIC_OF_THE_DOCS + "\nvalue = TargetEntropy()",
    "a metric without fields": (
        "class A(al.Metric):\n name = 'a'\n def __init__(self, k):\n  self.k = k\n"
        " def reads(self, batch):\n"
        "  return {'a': al.reads.At('pattern', al.edges.target, batch.label_positions)}\n"
        " def contributions(self, batch, seen):\n"
        "  gold = batch.label_token_ids[batch.gold][:, None]\n"
        "  return {'a': (seen.logits.topk(self.k).indices == gold).any(1).float()}\n"
        " def result(self, rows): return rows['a'].mean()\nvalue = A(3)"
    ),
    "an enum": "class A(Enum): b = 1\nvalue = lambda x: x * A.b.value",
    "a module of torch with a hook": (
        "class A(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.w = torch.nn.Parameter(torch.ones(2))\n def forward(self, x): return x * self.w\n"
        "a = A()\na.register_forward_hook(lambda m, args, out: out * 2)\nvalue = lambda x: a(x)"
    ),
    "a decorator": (
        "def twice(f):\n @functools.wraps(f)\n def g(x): return f(f(x))\n return g\n"
        "@torch.no_grad()\n@twice\ndef value(x): return x + 1"
    ),
    "classes": (
        "from abc import ABC, abstractmethod\nfrom typing import Generic, TypeVar\n"
        "T = TypeVar('T')\nclass B(ABC, Generic[T]):\n @abstractmethod\n def f(self): ...\n"
        "class C(B):\n def f(self): return 1\nvalue = C()"
    ),
    "a trainable": (
        "class A(al.contexts.Trainable):\n def __init__(self): self.w = torch.zeros(2)\n"
        " @property\n def parameters(self): return [self.w]\n"
        " def query_pass(self, model, batch): return al.contexts.QueryPass(batch)\nvalue = A()"
    ),
    "a class in a function": (
        "def value(x):\n class A:\n  k = 3\n  def f(self): return self.k * x\n return A().f()"
    ),
    "settings": (
        "value = [al.SaliencyFlows(), al.contexts.hard_prompts.PEZ, al.TASKS, al.sites.windows, {'a': {1, 2}},\n"
        " al.contexts.Training(steps=3), al.weights.attention, Path('x'), np.arange(3.), {'a': 1}.get]"
    ),
    "a name": "value = al.named('a, 1', lambda x: np.exp(x))",
}


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
    """What holds a number, each in two ways that are drawn at random; then the values themselves."""
    draw = random.Random(50)
    held = {
        f"{name}, {WAYS.index(way)}": "\n".join([made, way.replace("READ", read)])
        for name, (made, read) in ((name, row.split(" => ")) for name, row in HELD.items())
        for way in (WAYS if name == "a global" else (WAYS[0], draw.choice(WAYS[1:])))
    }
    return held | {f"{name} itself": source for name, source in OBJECTS.items()}


SOURCES = sources()


def both(source: str) -> list[str]:
    """The source with the first and with the second of what differs."""
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
@pytest.mark.slow_cases("each source in other code", *(f", {n}]" for n in range(1, len(WAYS))))
@pytest.mark.parametrize("name", SOURCES)
def test_another_number_is_another_fingerprint_or_unknown(
    name: str, gpt2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = of_nothing(gpt2)
    source, other = both(SOURCES[name])
    first, second = (fingerprint_of(each, gpt2) for each in (source, other))
    assert first.facts != second.facts or (first.unknown and second.unknown)
    if re.sub(r", \d+$| itself$", "", name) in SEEN:
        assert first.facts != second.facts and not first.unknown
        # The same source in another module is the same value, although each object is another one.
        assert fingerprint_of(source, gpt2) == first
    assert fingerprint_of("value = 1", gpt2) == before  # nothing of the source is left


EQUAL_WORDS: list[tuple[Any, Any]] = [
    (1, "1"),
    (None, "None"),
    ("a, b", ["a", "b"]),
    ([["a"], "b"], ["a", "b"]),
]


@pytest.mark.parametrize(("one", "other"), EQUAL_WORDS)
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


@pytest.mark.parametrize("source", SAME.values(), ids=SAME)
def test_what_decides_nothing_does_not_change_the_identity(source: str) -> None:
    first, second = (identity_of(value_of(each)) for each in both(source))
    assert first == second


@pytest.mark.parametrize("source", BELIEVED.values(), ids=BELIEVED)
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
        (
            "def value(x, k=2):\n assert 0 < k < 3\n assert x and k, 'm'\n return x",
            True,
        ),
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
    source = "value = lambda x, hook: x * hook.layer() if hook.name else x * model.cfg.n_layers"
    module = ModuleType("notebook")
    vars(module)["model"] = gpt2
    exec(source, vars(module))
    before = identity_of(module.value, Known(gpt2))
    assert before.unknown == ()
    for holder, read in ((gpt2.cfg, "cfg"), (gpt2.blocks[0].attn, "blocks[0].attn")):
        exec(f"value = lambda x, hook: x * model.{read}.tokens", vars(module))
        identities = []
        for number in (0.5, 3.0):
            holder.tokens = number  # a name that public classes have
            identities.append(identity_of(module.value, Known(gpt2)))
        del holder.tokens
        first, second = identities
        assert first.digest != second.digest or first.unknown


def test_a_name_is_believed_and_another_is_another() -> None:
    named = al.named("my score, 3", open)
    assert repr(named) == "named('my score, 3')"
    same, other = al.named("my score, 3", len), al.named("my score, 4", open)
    assert identity_of(named) == identity_of(same) != identity_of(other)
    assert signature(al.named("f", lambda a, b=1: a)) == signature(lambda a, b=1: a)
    with pytest.raises(ArgumentError, match="must be a text"):
        al.named(" ", len)


@pytest.mark.parametrize("folder", ["", " ", Path()], ids=repr)
def test_a_folder_without_a_name_is_an_error(folder: Any) -> None:
    """Wherever a folder is given."""
    taking = {
        name: function
        for name, function in public().items()
        if callable(function)
        and not (isinstance(function, type) and issubclass(function, (Exception, dict)))
        and "folder" in signature(function).parameters
    }
    assert {"run", "paper", "Training", "forget_run", "across_models"} <= taking.keys()
    for name, function in taking.items():
        needed = [
            each
            for each, parameter in signature(function).parameters.items()
            if parameter.default is parameter.empty
        ]
        with pytest.raises(ArgumentError, match=f"folder of {name}"):
            function(**(dict.fromkeys(needed) | {"folder": folder}))
