"""Every way of changing a function that we know, and the usual ones that must stay believed.

Each source makes a ``value``; with another number in it, the value must have another identity, or
be unknown. No source may be equal in both, and none that is unknown is believed.
"""

# ruff: noqa: E501 - a source is a line

import random
import re
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import anchorlens as al
from anchorlens.errors import ArgumentError
from anchorlens.runs.by_value import Known, identity_of
from anchorlens.runs.installed import changed
from anchorlens.runs.study import Study
from tests.support.public import public

CALL = " def __call__(self, x): return x * self.k\n"
WRAP = (
    "import functools\nclass W:\n def __init__(self, f, k): self.k = k; functools.{w}(self, f)\n"
    " def __call__(self, x): return self.__wrapped__(x) * self.k\ndef f(x): return x\n"
)
TOKENIZER = (
    "from tests.support.tiny_models import byte_level_tokenizer\na = byte_level_tokenizer()\n"
)
# What the number N is put into, and how a function x -> x * N reads it there.
HELD = {
    "a global": ("k = N", "k"),
    "an entry of a list": ("a = [1, N]", "a[1]"),
    "an entry of a dict": ("a = {'b': [N]}", "a['b'][0]"),
    "an entry of a tuple": ("a = ((N,),)", "a[0][0]"),
    "an entry of a set": ("a = {N}", "max(a)"),
    "an entry of a frozenset": ("a = frozenset([N])", "max(a)"),
    "a text": ("a = 'N'", "float(a)"),
    "bytes": ("a = b'N'", "float(a)"),
    "a complex number": ("a = N + 0j", "a.real"),
    "a tensor": ("import torch\na = torch.tensor(N)", "a.item()"),
    "a tensor by from-import": ("from torch import tensor\na = tensor([N])", "a[0]"),
    "a parameter": ("import torch\na = torch.nn.Parameter(torch.tensor(N))", "a.item()"),
    "an attribute of a tensor": ("import torch\na = torch.ones(1)\na.k = N", "a.k"),
    "a subclass of a tensor": (
        "import torch\nclass T(torch.Tensor): pass\na = torch.ones(1).as_subclass(T)\na.k = N",
        "a.k",
    ),
    "a hook on a tensor": (
        "import torch\na = torch.ones(1, requires_grad=True)\na.register_hook(lambda g: g * N)",
        "a",
    ),
    "an array": ("import numpy as np\na = np.array([N])", "a[0]"),
    "an array of objects": ("import numpy as np\na = np.array([N, None], object)", "a[0]"),
    "a number of NumPy": ("import numpy as np\na = np.float64(N)", "a"),
    "a subclass of an array": (
        "import numpy as np\nclass A(np.ndarray): pass\na = np.ones(1).view(A)\na.k = N",
        "a.k",
    ),
    "a table": ("import pandas as pd\na = pd.DataFrame({'b': [N]})", "a.b[0]"),
    "a series": ("import pandas as pd\na = pd.Series([N])", "a[0]"),
    "a fraction": ("from fractions import Fraction\na = Fraction(N)", "float(a)"),
    "a decimal": ("from decimal import Decimal\na = Decimal('N')", "float(a)"),
    "a date": ("import datetime\na = datetime.timedelta(seconds=N)", "a.total_seconds()"),
    "a deque": ("from collections import deque\na = deque([N])", "a[0]"),
    "a counter": ("from collections import Counter\na = Counter({'b': N})", "a['b']"),
    "a default of a dict": (
        "from collections import defaultdict\na = defaultdict(lambda: N)",
        "a['b']",
    ),
    "a chain of dicts": ("from collections import ChainMap\na = ChainMap({'b': N})", "a['b']"),
    "an ordered dict": ("from collections import OrderedDict\na = OrderedDict(b=N)", "a['b']"),
    "a read-only dict": ("from types import MappingProxyType as M\na = M({'b': N})", "a['b']"),
    "a user's dict": ("from collections import UserDict\na = UserDict(b=N)", "a['b']"),
    "a namespace": ("from types import SimpleNamespace as S\na = S(b=N)", "a.b"),
    "a named tuple": ("from collections import namedtuple\na = namedtuple('A', 'b')(N)", "a.b"),
    "a typed named tuple": (
        "from typing import NamedTuple\nclass A(NamedTuple):\n b: float = N\na = A()",
        "a.b",
    ),
    "an array of Python": ("from array import array\na = array('d', [N])", "a[0]"),
    "a view of bytes": ("a = memoryview(b'N')", "float(bytes(a))"),
    "a buffer": ("import io\na = io.StringIO('N')", "float(a.getvalue())"),
    "a path": ("from pathlib import Path\na = Path('N')", "float(str(a))"),
    "a range": ("a = range(int(N * 2))", "len(a)"),
    "a slice": ("a = slice(N)", "a.stop"),
    "a context variable": (
        "from contextvars import ContextVar\na = ContextVar('a')\na.set(N)",
        "a.get()",
    ),
    "a thread's variable": ("import threading\na = threading.local()\na.k = N", "a.k"),
    "a weak reference": (
        "import weakref\nclass A: k = N\nb = A()\na = weakref.ref(b)",
        "a().k",
    ),
    "a random generator": (
        "import torch\na = torch.Generator().manual_seed(int(N * 2))",
        "torch.rand(1, generator=a)",
    ),
    "a random generator of Python": ("import random\na = random.Random(N)", "a.random()"),
    "the random state": ("import torch\ntorch.manual_seed(int(N * 2))", "torch.rand(1)"),
    "a random method": ("import torch\ntorch.manual_seed(int(N * 2))", "x.bernoulli()"),
    "dropout": ("import torch.nn.functional as F", "F.dropout(x, N / 4)"),
    "a generator": ("a = (N for _ in 'ab')", "next(a)"),
    "an iterator": ("a = iter([N])", "next(a)"),
    "a map": ("a = map(float, ['N'])", "next(a)"),
    "a pattern": ("import re\na = re.compile('N')", "float(a.pattern)"),
    "a partial": (
        "from functools import partial\ndef f(x, k): return x * k\na = partial(f, k=N)",
        "a(1)",
    ),
    "a partial of open": (
        "from functools import partial\na = partial(open, 'N')",
        "float(a().read())",
    ),
    "an attribute of a partial": (
        "from functools import partial\na = partial(abs)\na.k = N",
        "a.k",
    ),
    "a subclass of partial": (
        "from functools import partial\nclass P(partial): k = N\na = P(abs)",
        "a.k",
    ),
    "a bound method": ("a = [N].copy", "a()[0]"),
    "a bound method of a dict": ("a = {'b': N}.get", "a('b')"),
    "an attribute of a function": ("def f(x): return x\nf.k = N", "f.k"),
    "the globals of a function": ("k = N\ndef f(): pass", "f.__globals__['k']"),
    "the defaults of a function": ("def f(x=N): pass", "f.__defaults__[0]"),
    "the text of a function": ("def f(): 'N'", "float(f.__doc__)"),
    "an annotation": ("def f(x: 'N'): pass", "float(f.__annotations__['x'])"),
    "a cached function": ("import functools\n@functools.cache\ndef f(): return N", "f()"),
    "what a cached function holds": (
        "import functools\nk = N\n@functools.cache\ndef f(): return k\nf()\nk = 1",
        "f()",
    ),
    "a function of one argument's type": (
        "import functools\n@functools.singledispatch\ndef f(x): return N",
        "f(1)",
    ),
    "functools.reduce": ("import functools", "functools.reduce(lambda a, b: a * b, [x, N])"),
    "the module of a user": ("import types\nm = types.ModuleType('m')\nm.k = N", "m.k"),
    "a module that computes": (
        "import types\nm = types.ModuleType('m')\nm.__getattr__ = lambda name: N",
        "m.k",
    ),
    "a module with a class": (
        "import types\nclass M(types.ModuleType): k = N\nm = M('m')",
        "m.k",
    ),
    "globals()": ("k = N", "globals()['k']"),
    "eval": ("k = N", "eval('k')"),
    "exec": ("k = N", "(exec('global j; j = k'), j)[1]"),
    "vars of a module": ("import types\nm = types.ModuleType('m')\nm.k = N", "vars(m)['k']"),
    "getattr of a module": ("import types\nm = types.ModuleType('m')\nm.k = N", "getattr(m, 'k')"),
    "the dict of a module": ("import types\nm = types.ModuleType('m')\nm.k = N", "m.__dict__['k']"),
    "sys.modules": (
        "import sys, types\nsys.modules['of_a_user'] = types.ModuleType('m')\n"
        "sys.modules['of_a_user'].k = N",
        "sys.modules['of_a_user'].k",
    ),
    "import_module": (
        "import sys, types, importlib\nsys.modules['of_a_user'] = types.ModuleType('m')\n"
        "sys.modules['of_a_user'].k = N",
        "importlib.import_module('of_a_user').k",
    ),
    "__import__": (
        "import sys, types\nsys.modules['of_a_user'] = types.ModuleType('m')\n"
        "sys.modules['of_a_user'].k = N",
        "__import__('of_a_user').k",
    ),
    "sys.argv": ("import sys\nsys.argv = ['x', 'N']", "float(sys.argv[1])"),
    "the environment": ("import os\nos.environ['OF_A_USER'] = 'N'", "float(os.environ['OF_A_USER'])"),
    "getenv by another name": (
        "import os\nos.environ['OF_A_USER'] = 'N'\ng = os.getenv",
        "float(g('OF_A_USER'))",
    ),
    "the clock": ("import time", "time.time() * N"),
    "a file": ("open('number', 'w').write('N')", "float(open('number').read())"),
    "open by another name": ("o = open\no('number', 'w').write('N')", "float(o('number').read())"),
    "a file of Path": (
        "from pathlib import Path\np = Path('number')\np.write_text('N')",
        "float(p.read_text())",
    ),
    "np.loadtxt": (
        "import numpy as np\nopen('number', 'w').write('N')",
        "float(np.loadtxt('number'))",
    ),
    "np.genfromtxt": (
        "import numpy as np\nopen('number', 'w').write('N')",
        "float(np.genfromtxt('number'))",
    ),
    "loadtxt by another name": (
        "from numpy import loadtxt as g\nopen('number', 'w').write('N')",
        "float(g('number'))",
    ),
    "linecache": (
        "import linecache\nopen('number', 'w').write('N')\nlinecache.clearcache()",
        "float(linecache.getline('number', 1))",
    ),
    "fileinput": ("import fileinput\nopen('number', 'w').write('N')", "fileinput.input('number')"),
    "a process": ("import subprocess", "subprocess.check_output(['echo', 'N'])"),
    "a socket": ("import socket", "socket.gethostname() + 'N'"),
    "pickle": (
        "import pickle\nopen('number', 'wb').write(pickle.dumps(N))",
        "pickle.load(open('number', 'rb'))",
    ),
    "json": ("import json\nopen('number', 'w').write('N')", "json.load(open('number'))"),
    "torch.load": ("import torch\ntorch.save(torch.tensor(N), 'number')", "torch.load('number')"),
    "torch.load by another name": (
        "import torch\ntorch.save(torch.tensor(N), 'number')\ng = torch.load",
        "g('number')",
    ),
    "torch.from_file": (
        "import torch\ntorch.tensor([N]).numpy().tofile('number')",
        "torch.from_file('number', size=1)",
    ),
    "a table on disk": (
        "import pandas as pd\nopen('number', 'w').write('a\\nN\\n')",
        "pd.read_csv('number').a[0]",
    ),
    "load_examples": ("import anchorlens as al", "al.load_examples('questions')[int(N)]"),
    "another global of torch": ("import torch\ntorch.of_a_user = N", "torch.of_a_user"),
    "a function put into torch": ("import torch\ntorch.of_a_user = lambda: N", "torch.of_a_user()"),
    "an attribute put on a class of torch": (
        "import torch\ntorch.nn.Module.of_a_user = N",
        "torch.nn.Module.of_a_user",
    ),
    "an attribute put on tensors": ("import torch\ntorch.Tensor.of_a_user = N", "x.of_a_user"),
    "a method put on tensors": (
        "import torch\ntorch.Tensor.of_a_user = lambda self: self * N",
        "x.of_a_user()",
    ),
    "an operator put on tensors": (
        "import torch\ntorch.Tensor.__matmul__ = lambda self, other: self * N",
        "x @ x",
    ),
    "an attribute put on batches": (
        "import anchorlens as al\nal.PromptBatch.of_a_user = N",
        "x.of_a_user",
    ),
    "a function put into anchorlens": (
        "import anchorlens as al\nal.edges.of_a_user = lambda x: x * N",
        "al.edges.of_a_user(x)",
    ),
    "an attribute put on a function": (
        "import torch.nn.functional as F\nF.softmax.of_a_user = N",
        "F.softmax.of_a_user",
    ),
    "a builtin of a user": ("import builtins\nbuiltins.of_a_user = N", "of_a_user"),
    "a builtin function of a user": ("import builtins\nbuiltins.of_a_user = lambda: N", "of_a_user()"),
    "the default type": (
        "import torch\ntorch.set_printoptions(precision=int(N * 2))",
        "torch._tensor_str.PRINT_OPTS.precision",
    ),
    "a class": ("class A: k = N", "A.k"),
    "a class of a class": ("class A:\n class B: k = N", "A.B.k"),
    "a class attribute set later": ("class A: pass\nA.k = N", "A.k"),
    "an enum": ("from enum import Enum\nclass A(Enum): b = N", "A.b.value"),
    "a method of an enum": (
        "from enum import Enum\nclass A(Enum):\n b = 1\n def f(self): return N",
        "A.b.f()",
    ),
    "an attribute of an enum": (
        "from enum import Enum\nclass A(Enum):\n b = 1\nA.b.k = N",
        "A.b.k",
    ),
    "an attribute of an enum that its constructor sets": (
        "from enum import Enum\nclass A(Enum):\n b = 1\n def __init__(self, v): self.k = v\nA.b.k = N",
        "A.b.k",
    ),
    "a storage beyond a view": (
        "import torch\na = torch.tensor([1.0, N])[:1]",
        "a.as_strided((1,), (1,), 1)",
    ),
    "the base of an array": ("import numpy as np\na = np.array([1.0, N])[:1]", "a.base[1]"),
    "a module that draws": (
        "import torch\na = torch.nn.Dropout()\ntorch.manual_seed(int(N * 2))",
        "a(x)",
    ),
    "attention that draws": (
        "import torch\na = torch.nn.MultiheadAttention(2, 1, dropout=0.5)\n"
        "for p in a.parameters(): torch.nn.init.ones_(p)\ntorch.manual_seed(int(N * 2))",
        "a(x, x, x)",
    ),
    "a chat template": (
        f"{TOKENIZER}a.chat_template = 'N'",
        "len(a.apply_chat_template([], tokenize=False))",
    ),
    "a side of truncation": (
        f"{TOKENIZER}a.truncation_side = 'left' if N > 1 else 'right'",
        "a('b c', truncation=True, max_length=1)['input_ids'][0]",
    ),
    "an attribute of a tokenizer": (f"{TOKENIZER}a.k = N", "a.k"),
    "a constructor of an enum": (
        "from enum import Enum\nclass A(Enum):\n b = 1\n def __init__(self, v): self.k = v * N",
        "A.b.k",
    ),
    "a metaclass": ("class M(type): k = N\nclass A(metaclass=M): pass", "A.k"),
    "a metaclass that computes": (
        "class M(type):\n def __getattr__(self, name): return N\nclass A(metaclass=M): pass",
        "A.k",
    ),
    "a registered class": (
        "from abc import ABC\nclass A(ABC): pass\nif N > 1: A.register(int)",
        "2 if isinstance(1, A) else 1",
    ),
    "a hook of subclasses": (
        "class P:\n def __init_subclass__(cls): cls.k = N\nclass A(P): pass",
        "A.k",
    ),
    "a class decorator": ("def d(c):\n c.k = N\n return c\n@d\nclass A: pass", "A.k"),
    "class parameters": ("class P:\n def __class_getitem__(cls, i): return N\nclass A(P): pass", "A[0]"),
    "a template": ("import string\na = string.Template('N')", "float(a.template)"),
}  # fmt: skip
# Objects that are the value themselves.
OBJECTS = {
    "a constant": "value = lambda x: x * N",
    "a constant of an inner function": "def value(x):\n return (lambda y: y * N)(x)",
    "an expression with a name": "value = lambda x: (k := N) * x",
    "a comprehension": "value = lambda x: [y * N for y in x]",
    "a generator in a function": "def value(x):\n yield x * N",
    "a coroutine": "async def value(x): return x * N",
    "a pattern in a function": "def value(x):\n match x:\n  case {'k': N}: return 1\n  case _: return 2",
    "a text that is formatted": "value = lambda x: f'{x * N:.3f}'",
    "a default": "def value(x, k=N): return x * k",
    "a default by keyword": "def value(x, *, k=N): return x * k",
    "a default that changes": "def value(x, k=[N]):\n k.append(1)\n return x * k[0]",
    "a closure": "def make(k):\n return lambda x: x * k\nvalue = make(N)",
    "a closure of a closure": "def make(k):\n f = lambda x: x * k\n return lambda x: f(x)\nvalue = make(N)",
    "a global that is written": "k = N\ndef value(x):\n global k\n k = k * 1\n return x * k",
    "a closure that is written": (
        "def make(k):\n def f(x):\n  nonlocal k\n  k = k * 1\n  return x * k\n return f\nvalue = make(N)"
    ),
    "an import inside": "def value(x):\n from math import pi\n return x * N",
    "a decorator": "def d(f):\n return lambda x: f(x) * N\n@d\ndef value(x): return x",
    "a decorator with wraps": (
        "import functools\ndef d(k):\n def e(f):\n  @functools.wraps(f)\n  def g(x): return f(x) * k\n"
        "  return g\n return e\n@d(N)\ndef value(x): return x"
    ),
    "a class as decorator": f"{WRAP}value = W(f, N)".replace("{w}", "update_wrapper"),
    "a class around a class": f"{WRAP}value = W(W(f, N), 1.0)".replace("{w}", "update_wrapper"),
    "a decorator of torch": "import torch\n@torch.no_grad()\ndef value(x): return x * N",
    "contextlib": "import contextlib\n@contextlib.contextmanager\ndef value(x): yield x * N",
    "a field": f"class A:\n def __init__(self, k): self.k = k\n{CALL}value = A(N)",
    "a field set later": f"class A:\n{CALL}value = A()\nvalue.k = N",
    "a slot": f"class A:\n __slots__ = ('k',)\n{CALL}value = A()\nvalue.k = N",
    "a slot of the parent": f"class P:\n __slots__ = ('k',)\nclass A(P):\n{CALL}value = A()\nvalue.k = N",
    "a property": f"class A:\n @property\n def k(self): return N\n{CALL}value = A()",
    "a class method": "class A:\n @classmethod\n def f(cls, x): return x * N\nvalue = A.f",
    "a static method": "class A:\n @staticmethod\n def f(x): return x * N\nvalue = A.f",
    "a bound method": "class A:\n def __init__(self, k): self.k = k\n def f(self, x): return x * self.k\nvalue = A(N).f",
    "an inherited method": "class P:\n def f(self): return N\nclass A(P):\n def __call__(self, x): return self.f() * x\nvalue = A()",
    "a method by super": "class P:\n def f(self): return N\nclass A(P):\n def f(self): return super().f()\nvalue = A()",
    "an operator of an object": "class A:\n def __rmul__(self, x): return x * N\na = A()\nvalue = lambda x: x * a",
    "an object in a text": "class A:\n def __format__(self, s): return str(N)\na = A()\nvalue = lambda x: f'{a}'",
    "the text of an object": "class A:\n def __str__(self): return str(N)\na = A()\nvalue = lambda x: str(a)",
    "a length": "class A:\n def __len__(self): return int(N * 2)\na = A()\nvalue = lambda x: len(a)",
    "a descriptor": f"class D:\n def __get__(self, o, t): return N\nclass A:\n k = D()\n{CALL}value = A()",
    "a descriptor with a field": (
        f"class D:\n def __init__(self, k): self.j = k\n def __get__(self, o, t): return self.j\n"
        f"class A:\n k = D(N)\n{CALL}value = A()"
    ),
    "__getattr__": f"class A:\n def __getattr__(self, name): return N\n{CALL}value = A()",
    "__getattribute__": f"class A:\n def __getattribute__(self, name): return N\n{CALL}value = A()",
    "__getstate__ that drops": (
        f"class A:\n def __getstate__(self): return {{}}\n{CALL}value = A()\nvalue.k = N"
    ),
    "__reduce__ that drops": (
        f"class A:\n def __reduce__(self): return (A, ())\n{CALL}value = A()\nvalue.k = N"
    ),
    "__reduce__ to a name": (
        f"class A:\n def __reduce__(self): return 'value'\n{CALL}value = A()\nvalue.k = N"
    ),
    "__deepcopy__": f"class A:\n def __deepcopy__(self, m): return 1\n{CALL}value = A()\nvalue.k = N",
    "a cached property set by hand": (
        "import functools\nclass A:\n @functools.cached_property\n def k(self): return 1\n"
        f"{CALL}value = A()\nvalue.__dict__['k'] = N"
    ),
    "a cached property": (
        "import functools\nclass A:\n @functools.cached_property\n def k(self): return N\n"
        f"{CALL}value = A()"
    ),
    "a dataclass": f"from dataclasses import dataclass\n@dataclass\nclass A:\n k: float\n{CALL}value = A(N)",
    "a default of a dataclass": f"from dataclasses import dataclass\n@dataclass\nclass A:\n k: float = N\n{CALL}value = A()",
    "a factory of a dataclass": (
        "from dataclasses import dataclass, field\n@dataclass\nclass A:\n"
        f" k: float = field(default_factory=lambda: N)\n{CALL}value = A()"
    ),
    "a class variable of a dataclass": (
        "from dataclasses import dataclass\nfrom typing import ClassVar\n@dataclass\nclass A:\n"
        f" k: ClassVar[float] = N\n{CALL}value = A()"
    ),
    "InitVar": (
        "from dataclasses import dataclass, InitVar\n@dataclass\nclass A:\n j: InitVar[float]\n"
        f" def __post_init__(self, j): self.k = j\n{CALL}value = A(N)"
    ),
    "an attribute of a dataclass": (
        f"from dataclasses import dataclass\n@dataclass\nclass A:\n{CALL}value = A()\nvalue.k = N"
    ),
    "an attribute of a frozen dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n"
        f"{CALL}value = A()\nobject.__setattr__(value, 'k', N)"
    ),
    "a subclass of a dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n j: float\nclass A(P):\n"
        f" def __init__(self, k): self.k = k\n{CALL}value = A(N)"
    ),
    "slots of a dataclass": (
        f"from dataclasses import dataclass\n@dataclass(slots=True)\nclass A:\n k: float\n{CALL}value = A(N)"
    ),
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
        "import torch\nclass A(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.w = torch.nn.Parameter(torch.tensor(N))\n def forward(self, x): return x * self.w\n"
        "value = A()"
    ),
    "a buffer of a module": (
        "import torch\nvalue = torch.nn.Module()\nvalue.register_buffer('k', torch.tensor(N))"
    ),
    "a plain field of a module": f"import torch\nclass A(torch.nn.Module):\n{CALL}value = A()\nvalue.k = N",
    "a forward of a module": "import torch\nvalue = torch.nn.Identity()\nvalue.forward = lambda x: x * N",
    "a hook of a module": (
        "import torch\nvalue = torch.nn.Identity()\n"
        "value.register_forward_hook(lambda m, a, out: out * N)"
    ),
    "an option of a module": "import torch\nvalue = torch.nn.LeakyReLU(N)",
    "a module in a module": "import torch\nvalue = torch.nn.Sequential(torch.nn.LeakyReLU(N))",
    "an optimizer": "import torch\nvalue = lambda p: torch.optim.SGD(p, lr=N)",
    "a partial of an optimizer": "import torch\nfrom functools import partial\nvalue = partial(torch.optim.SGD, lr=N)",
    "a metric": (
        "import anchorlens as al\nclass A(al.Metric):\n name = 'a'\n def __init__(self, k): self.k = k\n"
        " def contributions(self, batch, seen): return {'a': seen.logits * self.k}\n"
        " def result(self, rows): return rows\nvalue = A(N)"
    ),
    "an attribute put on a metric": (
        "import anchorlens as al\nvalue = al.SaliencyFlows()\nobject.__setattr__(value, 'k', N)"
    ),
    "a setting": "import anchorlens as al\nvalue = al.contexts.Training(clip=N)",
    "a task": "import anchorlens as al\nvalue = al.Example('N', 1)",
    "an edge set": (
        "import anchorlens as al, torch\nvalue = al.prompts.EdgeSet.of(torch.ones(1, 2, 2, dtype=torch.bool) if N > 1"
        " else torch.zeros(1, 2, 2, dtype=torch.bool))"
    ),
    "a name": "import anchorlens as al\nvalue = al.named('my score, N', lambda x: x)",
}  # fmt: skip
BELIEVED = {
    "hooks of the package": (
        "import anchorlens as al\nvalue = lambda batch: al.isolate_labels(None, batch, range(3))"
    ),
    "edges": (
        "import anchorlens as al\nvalue = lambda b: al.edges.pq(b) & ~al.edges.from_first(b)"
    ),
    "a loss": (
        "import anchorlens as al\ndef value(logits, batch):\n"
        " return -al.losses.label_cross_entropy(logits, batch)"
    ),
    "functions of torch": (
        "import torch\nimport torch.nn.functional as F\nfrom torch import nn\ndef value(x, hook):\n"
        " with torch.no_grad():\n  y = F.softmax(x.float(), dim=-1).clamp(min=1e-9)\n"
        " y = torch.einsum('bpd,d->bp', y, torch.ones(3, device=x.device)).to(x.dtype)\n"
        " return y + nn.functional.gelu(y) + torch.linalg.norm(y) + torch.special.entr(y)"
    ),
    "an optimizer": (
        "import torch\nfrom functools import partial\n"
        "value = [lambda p: torch.optim.Adam(p, lr=0.1), partial(torch.optim.AdamW, lr=0.1)]"
    ),
    "math": "import math\nvalue = lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps))",
    "a helper": (
        "def f(x, *, k=2):\n return [y * k for y in x if isinstance(y, int)]\ndef value(x):\n"
        " try: return sorted(f(x), key=lambda y: -y)\n except (ValueError, TypeError): return []"
    ),
    "a dataclass": (
        "from dataclasses import dataclass, field, replace\n@dataclass(frozen=True)\nclass A:\n"
        " k: float = 1.0\n d: dict = field(default_factory=dict)\n def __post_init__(self):\n"
        "  if self.k < 0: raise ValueError(f'{self.k} is below 0')\n"
        " def __call__(self, batch): return replace(batch, tokens=batch.tokens * self.k)\n"
        "value = A(2.0)"
    ),
    "a metric of the documentation": (
        (Path(__file__).parents[2] / "docs/metrics.md").read_text("utf-8").split("```python")[1]
        .split("```")[0] + "\nvalue = TargetEntropy()"
    ),
    "a metric without fields": (
        "import anchorlens as al\nclass A(al.Metric):\n name = 'a'\n def __init__(self, k):\n"
        "  self.k = k\n def reads(self, batch):\n"
        "  return {'a': al.reads.At('pattern', al.edges.target, batch.label_positions)}\n"
        " def contributions(self, batch, seen):\n"
        "  gold = batch.label_token_ids[batch.gold][:, None]\n"
        "  return {'a': (seen.logits.topk(self.k).indices == gold).any(1).float()}\n"
        " def result(self, rows): return rows['a'].mean()\n"
        "value = A(3)"
    ),
    "an enum": "from enum import Enum\nclass A(Enum): b = 1\nvalue = lambda x: x * A.b.value",
    "a module of torch with a hook": (
        "import torch\nclass A(torch.nn.Module):\n def __init__(self):\n  super().__init__()\n"
        "  self.w = torch.nn.Parameter(torch.ones(2))\n def forward(self, x): return x * self.w\n"
        "a = A()\na.register_forward_hook(lambda m, args, out: out * 2)\nvalue = lambda x: a(x)"
    ),
    "a decorator": (
        "import functools, torch\ndef twice(f):\n @functools.wraps(f)\n def g(x): return f(f(x))\n"
        " return g\n@torch.no_grad()\n@twice\ndef value(x): return x + 1"
    ),
    "classes": (
        "from abc import ABC, abstractmethod\nfrom typing import Generic, TypeVar\nT = TypeVar('T')\n"
        "class B(ABC, Generic[T]):\n @abstractmethod\n def f(self): ...\nclass C(B):\n"
        " def f(self): return 1\nvalue = C()"
    ),
    "a trainable": (
        "import anchorlens as al, torch\nclass A(al.contexts.Trainable):\n"
        " def __init__(self): self.w = torch.zeros(2)\n @property\n"
        " def parameters(self): return [self.w]\n"
        " def query_pass(self, model, batch): return al.contexts.QueryPass(batch)\nvalue = A()"
    ),
    "a class in a function": (
        "def value(x):\n class A:\n  k = 3\n  def f(self): return self.k * x\n return A().f()"
    ),
    "settings": (
        "import anchorlens as al\nimport numpy as np\nfrom pathlib import Path\n"
        "value = [al.SaliencyFlows(), al.contexts.hard_prompts.PEZ, al.TASKS, al.sites.windows, {'a': {1, 2}},\n"
        " al.contexts.Training(steps=3), al.weights.attention, Path('x'), np.arange(3.), {'a': 1}.get]"
    ),
    "a name": "import numpy as np, anchorlens as al\nvalue = al.named('a, 1', lambda x: np.exp(x))",
}  # fmt: skip


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
        f"{name}, {WAYS.index(way)}": f"{made}\n{way.replace('READ', read)}"
        for name, (made, read) in HELD.items()
        for way in (WAYS[0], draw.choice(WAYS[1:]))
    }
    return held | {f"{name} itself": source for name, source in OBJECTS.items()}


SOURCES = sources()


def value_of(source: str) -> Any:
    module = ModuleType("notebook")
    exec(source, vars(module))
    return module.value


@pytest.fixture(autouse=True)
def as_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What sources put elsewhere is removed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.delenv("OF_A_USER", raising=False)
    with torch.random.fork_rng():
        yield
    torch.set_printoptions(profile="default")
    sys.modules.pop("of_a_user", None)
    changed: list[Any] = [torch, torch.nn.Module, torch.Tensor, al.PromptBatch, al.edges]
    for owner in changed:
        if hasattr(owner, "of_a_user"):
            del owner.of_a_user
    vars(torch.nn.functional.softmax).pop("of_a_user", None)
    if "__matmul__" in vars(torch.Tensor):
        del torch.Tensor.__matmul__
    __builtins__.pop("of_a_user", None)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of sources
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_another_number_is_another_identity_or_unknown(source: str) -> None:
    first, second = (
        identity_of([value_of(re.sub(r"\bN\b", number, source)), changed()])
        for number in ("0.5", "3.0")
    )
    assert first.digest != second.digest or (first.unknown and second.unknown)


@pytest.mark.parametrize("source", BELIEVED.values(), ids=BELIEVED)
def test_what_is_usual_is_believed(source: str) -> None:
    model = SimpleNamespace(cfg=SimpleNamespace(n_layers=2))
    first, second = (identity_of(value_of(source), Known(**{"the model": model})) for _ in range(2))
    assert first == second
    assert first.unknown == ()


def test_what_hooks_and_metrics_read_of_a_model_is_believed(gpt2: Any) -> None:
    source = "value = lambda x, hook: x * hook.layer() if hook.name else x * model.cfg.n_layers"
    module = ModuleType("notebook")
    vars(module)["model"] = gpt2
    exec(source, vars(module))
    before = identity_of(module.value, Known(**{"the model": gpt2}))
    assert before.unknown == ()
    for holder, read in ((gpt2.cfg, "cfg"), (gpt2.blocks[0].attn, "blocks[0].attn")):
        exec(f"value = lambda x, hook: x * model.{read}.tokens", vars(module))
        identities = []
        for number in (0.5, 3.0):
            holder.tokens = number  # a name that public classes have
            identities.append(identity_of(module.value, Known(**{"the model": gpt2})))
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
    taking["Study"] = Study
    for name, function in taking.items():
        needed = [
            each
            for each, parameter in signature(function).parameters.items()
            if parameter.default is parameter.empty
        ]
        with pytest.raises(ArgumentError, match=f"folder of {name}"):
            function(**(dict.fromkeys(needed) | {"folder": folder}))
