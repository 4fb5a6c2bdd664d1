"""What is changed below what a function names: in torch, in this package, in tokenizers, in models.

Each source makes a ``value``; with another number in it, the fingerprint of a run that is asked for
it must be another, or say that something is unknown. What a source changes is put back after it.
"""

# ruff: noqa: E501 - a source is a line

import re
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import anchorlens as al
from anchorlens.runs.identity import Fingerprint, fingerprint
from tests.support.tiny_models import byte_level_tokenizer, tiny_gpt2

# A source with the number N, and what puts back what it changes.
SOURCES = {
    "forward of a class of torch": (
        "_f=nn.GELU.forward\nnn.GELU.forward=lambda self,x: x*N\nact=nn.GELU()\nvalue=lambda x: act(x)",
        "nn.GELU.forward=_f",
    ),
    "call of all modules": (
        "_f=nn.Module._call_impl\ndef patched(self,*a,**k): return _f(self,*a,**k)*N\nnn.Module._call_impl=patched\nact=nn.GELU()\nvalue=lambda x: act(x)",
        "nn.Module._call_impl=_f",
    ),
    "softmax of tensors": (
        "_f=torch.Tensor.softmax\ntorch.Tensor.softmax=lambda self,d: self*N\nvalue=lambda x: F.softmax(x,-1)",
        "del torch.Tensor.softmax",
    ),
    "function below a module": (
        "_f=F.gelu\nF.gelu=lambda x,**k: x*N\nact=nn.GELU()\nvalue=lambda x: act(x)",
        "F.gelu=_f",
    ),
    "another function of torch below": (
        "_f=F.gelu\nif N>1: F.gelu=F.relu\nact=nn.GELU()\nvalue=lambda x: act(x)",
        "F.gelu=_f",
    ),
    "forward of another class": (
        "_f=nn.GELU.forward\nif N>1: nn.GELU.forward=nn.ReLU.forward\nact=nn.GELU()\nvalue=lambda x: act(x)",
        "nn.GELU.forward=_f",
    ),
    "contributions of a metric": (
        "_f=al.Accuracy.contributions\ndef w(self,b,s): return {n: v*N for n,v in _f(self,b,s).items()}\nal.Accuracy.contributions=w\nvalue=al.Accuracy()",
        "al.Accuracy.contributions=_f",
    ),
    "result of a metric": (
        "_f=al.SaliencyFlows.result\nal.SaliencyFlows.result=lambda self,r: N\nvalue=al.SaliencyFlows()",
        "al.SaliencyFlows.result=_f",
    ),
    "a default of a function of ours": (
        "from anchorlens.hooks import scale_edges as g\nwhile hasattr(g,'__wrapped__'): g=g.__wrapped__\n_d=g.__kwdefaults__\ng.__kwdefaults__={**(_d or {}),'zz':N}\nvalue=lambda b: al.scale_edges(model,b)",
        "g.__kwdefaults__=_d",
    ),
    "a default of torch": (
        "_d=F.layer_norm.__defaults__\nF.layer_norm.__defaults__=(None,None,N)\nvalue=lambda x: F.layer_norm(x,(3,))",
        "F.layer_norm.__defaults__=_d",
    ),
    "the code of a function of torch": (
        "_c=F.layer_norm.__code__\ndef g(input,normalized_shape,weight=None,bias=None,eps=1): return input*N\nF.layer_norm.__code__=g.__code__\nvalue=lambda x: F.layer_norm(x,(3,))",
        "F.layer_norm.__code__=_c",
    ),
    "an operator of tensors": (
        "torch.Tensor.__matmul__=lambda a,b: a*N\nvalue=lambda x: x@x",
        "del torch.Tensor.__matmul__",
    ),
    "step of an optimizer": (
        "_f=torch.optim.SGD.step\ntorch.optim.SGD.step=lambda self,closure=None: N\nvalue=lambda p: torch.optim.SGD(p,lr=1)",
        "torch.optim.SGD.step=_f",
    ),
    "clip_grad_norm_": (
        "_f=torch.nn.utils.clip_grad_norm_\nimport torch.nn.utils.clip_grad as cg\n_g=cg.clip_grad_norm_\ncg.clip_grad_norm_=lambda p,m: N\nvalue=al.contexts.Training()",
        "cg.clip_grad_norm_=_g",
    ),
    "a global forward hook": (
        "h=nn.modules.module.register_module_forward_hook(lambda m,a,o: o*N)\nvalue=lambda x: x",
        "h.remove()",
    ),
    "a global pre hook": (
        "h=nn.modules.module.register_module_forward_pre_hook(lambda m,a: N)\nvalue=lambda x: x",
        "h.remove()",
    ),
    "a global backward hook": (
        "h=nn.modules.module.register_module_full_backward_hook(lambda m,a,o: N)\nvalue=lambda x: x",
        "h.remove()",
    ),
    "a global optimizer hook": (
        "from torch.optim.optimizer import register_optimizer_step_post_hook as reg\nh=reg(lambda o,a,k: N)\nvalue=lambda x: x",
        "h.remove()",
    ),
    "a registration hook": (
        "h=nn.modules.module.register_module_module_registration_hook(lambda m,n,s: N)\nvalue=lambda x: x",
        "h.remove()",
    ),
    "a torch function mode": (
        "from torch.overrides import TorchFunctionMode\nclass M(TorchFunctionMode):\n def __torch_function__(self,f,t,a=(),k=None):\n  out=f(*a,**(k or {}))\n  return out*N if f is torch.mul else out\n_m=M()\n_m.__enter__()\nvalue=lambda x: x",
        "_m.__exit__(None,None,None)",
    ),
    "a forward of a part of the model": (
        "_p=model.original_model.transformer.h[0].mlp\n_p.forward=lambda x: x*N\nvalue=lambda x: x",
        "vars(_p.original_component).pop('forward')",
    ),
    "a forward of a class of the model": (
        "_k=type(model.original_model.transformer.h[0].mlp)\n_f=_k.forward\n_k.forward=lambda self,x: x*N\nvalue=lambda x: x",
        "_k.forward=_f",
    ),
    "a chat template": (
        "t=byte_level_tokenizer()\nt.chat_template='N'\nvalue=lambda x: t.apply_chat_template([])",
        "",
    ),
    "a truncation side": (
        "t=byte_level_tokenizer()\nt.truncation_side='left' if N>1 else 'right'\nvalue=lambda x: t('a')",
        "",
    ),
    "a padding side": (
        "t=byte_level_tokenizer()\nt.padding_side='left' if N>1 else 'right'\nvalue=lambda x: t('a')",
        "",
    ),
    "input names of a tokenizer": (
        "t=byte_level_tokenizer()\nt.model_input_names=['N']\nvalue=lambda x: t('a')",
        "",
    ),
    "an attribute of a tokenizer": ("t=byte_level_tokenizer()\nt.k=N\nvalue=lambda x: x*t.k", ""),
    "added tokens": ("t=byte_level_tokenizer()\nt.add_tokens(['z-N'])\nvalue=lambda x: t('a')", ""),
    "an init option": (
        "t=byte_level_tokenizer()\nt.init_kwargs['k']=N\nvalue=lambda x: t('a')",
        "",
    ),
    "a method of a tokenizer": (
        "t=byte_level_tokenizer()\nt.encode=lambda x: [N]\nvalue=lambda x: t.encode('a')",
        "",
    ),
    "a method of the class of tokenizers": (
        "t=byte_level_tokenizer()\n_k=type(t)\n_k.encode=lambda self,x: [N]\nvalue=lambda x: t.encode('a')",
        "del _k.encode",
    ),
    "a normalizer": (
        "from tokenizers import normalizers\nt=byte_level_tokenizer()\nt.backend_tokenizer.normalizer=normalizers.Replace('a','N')\nvalue=lambda x: t('a')",
        "",
    ),
    "tokens of the model": (
        "_t=model.tokenizer\nimport copy\nmodel.tokenizer=copy.deepcopy(_t)\nmodel.tokenizer.add_tokens(['z-N'])\nvalue=lambda x: x*model.to_tokens('z').shape[1]",
        "model.tokenizer=_t",
    ),
    "a token of the model": (
        "_t=model.tokenizer\nimport copy\nmodel.tokenizer=copy.deepcopy(_t)\nmodel.tokenizer.add_tokens(['z-N'])\nvalue=lambda x: x*model.to_single_token('z')",
        "model.tokenizer=_t",
    ),
    "a text for the model": (
        "_t=model.tokenizer\nimport copy\nmodel.tokenizer=copy.deepcopy(_t)\nmodel.tokenizer.add_tokens(['z-N'])\nvalue=lambda x: x*model('z-N').sum()",
        "model.tokenizer=_t",
    ),
    "a BOS of the model": (
        "_b=model.cfg.default_prepend_bos\nmodel.cfg.default_prepend_bos=N>1\nvalue=lambda x: x*model.to_tokens('z').shape[1]",
        "model.cfg.default_prepend_bos=_b",
    ),
    "a drawn text": (
        "torch.manual_seed(int(N*2))\nvalue=lambda x: model.generate(x, do_sample=True)",
        "",
    ),
    "a second model": (
        "m=al.load_model(tiny_gpt2(3000),tokenizer=byte_level_tokenizer())\nm.original_model.transformer.h[0].mlp.k=N\nvalue=lambda x: m(x)",
        "",
    ),
    "a second model of transformers": (
        "m=tiny_gpt2(3000)\nm.config.k=N\nvalue=lambda x: m(x).logits",
        "",
    ),
    "dropout": ("d=nn.Dropout(0.5)\ntorch.manual_seed(int(N*2))\nvalue=lambda x: d(x)", ""),
    "dropout in a sequence": (
        "d=nn.Sequential(nn.ReLU(),nn.Dropout(0.5))\ntorch.manual_seed(int(N*2))\nvalue=lambda x: d(x)",
        "",
    ),
    "rrelu": ("d=nn.RReLU()\ntorch.manual_seed(int(N*2))\nvalue=lambda x: d(x)", ""),
    "attention with dropout": (
        "d=nn.MultiheadAttention(4,2,dropout=0.5)\nnn.init.ones_(d.in_proj_weight);nn.init.ones_(d.out_proj.weight)\ntorch.manual_seed(int(N*2))\nvalue=lambda x: d(x,x,x)",
        "",
    ),
    "a layer made inside": ("torch.manual_seed(int(N*2))\nvalue=lambda x: nn.Linear(3,3)(x)", ""),
    "an embedding made inside": (
        "torch.manual_seed(int(N*2))\nvalue=lambda x: torch.nn.Embedding(3,3)(x)",
        "",
    ),
    "a layer made by another name": (
        "from torch.nn import GRU as G\nimport torch\ntorch.manual_seed(int(N*2))\nvalue=lambda x: G(3,3)(x)",
        "",
    ),
    "dropout made inside": ("torch.manual_seed(int(N*2))\nvalue=lambda x: nn.Dropout(0.5)(x)", ""),
    "dropout that code turns on": (
        "d=nn.Dropout(0.5).eval()\ntorch.manual_seed(int(N*2))\nvalue=lambda x: d.train()(x)",
        "",
    ),
    "an attribute of an enum member": (
        "from enum import Enum\nclass A(Enum):\n b=1\n def __init__(self,v): self.k=v\nA.b.k=N\nvalue=lambda x: x*A.b.k",
        "",
    ),
    "an attribute of a flag": (
        "from enum import Flag\nclass A(Flag):\n b=1\n def __init__(self,v): self.k=v\nA.b.k=N\nvalue=lambda x: x*A.b.k",
        "",
    ),
    "the name of a function": (
        "def f(x): return x\nf.__name__='N'\nvalue=lambda x: x*float(f.__name__)",
        "",
    ),
    "the full name of a function": (
        "def f(x): return x\nf.__qualname__='N'\nvalue=lambda x: x*float(f.__qualname__)",
        "",
    ),
    "the name of a class": (
        "class A: pass\nA.__name__='N'\nvalue=lambda x: x*float(A.__name__)",
        "",
    ),
    "the name of the type of an object": (
        "class A: pass\nA.__qualname__='N'\na=A()\nvalue=lambda x: x*float(type(a).__qualname__)",
        "",
    ),
    "the module of a class": (
        "class A: pass\nA.__module__='N'\nvalue=lambda x: x*float(A.__module__)",
        "",
    ),
    "a storage beyond a view": (
        "import torch\nb=torch.tensor([1.,N])\na=b[:1]\nvalue=lambda x: x*a.as_strided((1,),(1,),1)",
        "",
    ),
    "a storage by its name": (
        "import torch\nb=torch.tensor([1.,N])\na=b[:1]\nvalue=lambda x: x*a.untyped_storage()[7]",
        "",
    ),
    "the base of an array": (
        "import numpy as np\nb=np.array([1.,N])\na=b[:1]\nvalue=lambda x: x*a.base[1]",
        "",
    ),
    "the stride of a tensor": (
        "import torch\na=torch.ones(2,2) if N>1 else torch.ones(2,2).T.contiguous().T\nvalue=lambda x: x*a.stride()[0]",
        "",
    ),
    "a docstring that is returned": ("def value(x):\n 'N'\n return 'N'", ""),
    "a docstring that is read": (
        "def f(x):\n 'N'\n return x\nvalue=lambda x: x*float(f.__doc__)",
        "",
    ),
    "an assert that binds": ("def value(x):\n assert (k:=N)\n return x*k", ""),
    "an assert that calls": (
        "import torch\ndef value(x):\n assert x.mul_(N) is not None\n return x",
        "",
    ),
    "partialmethod": (
        "from functools import partialmethod\nclass A:\n def f(self,x,k): return x*k\n g=partialmethod(f,k=N)\nvalue=A().g",
        "",
    ),
    "a parametrization": (
        "import torch\nfrom torch.nn.utils import parametrize\nclass P(torch.nn.Module):\n def forward(self,w): return w*N\nm=torch.nn.ReLU()\nm.w=torch.nn.Parameter(torch.ones(1))\nparametrize.register_parametrization(m,'w',P())\nvalue=lambda x: x*m.w",
        "",
    ),
    "a hook of the model's point": (
        "model.blocks[0].hook_resid_post.ctx['k']=N\nvalue=lambda x,hook: x*hook.ctx['k']",
        "model.blocks[0].hook_resid_post.ctx.clear()",
    ),
    "an attribute of the model": (
        "model.of_me=N\nvalue=lambda x: x*model.of_me",
        "del model.of_me",
    ),
    "hash of a text": ("value=lambda x: x*(hash('a') % int(N*9))", ""),
}


def fingerprint_of(source: str, undo: str, model: Any) -> Fingerprint:
    space = ModuleType("notebook")
    vars(space).update(torch=torch, nn=nn, F=functional, al=al, model=model)
    vars(space).update(byte_level_tokenizer=byte_level_tokenizer, tiny_gpt2=tiny_gpt2)
    try:
        with torch.random.fork_rng():
            exec(source, vars(space))
        return fingerprint(model, (), {"asked": space.value})
    finally:
        exec(undo, vars(space))


@pytest.mark.parametrize("name", SOURCES)
def test_a_change_below_is_another_fingerprint_or_unknown(name: str, gpt2: Any) -> None:
    source, undo = SOURCES[name]
    before = fingerprint_of("value = 1", "", gpt2)
    first, second = (
        fingerprint_of(re.sub(r"\bN\b", number, source), undo, gpt2) for number in ("0.5", "3.0")
    )
    assert first.facts != second.facts or (first.unknown and second.unknown)
    assert fingerprint_of("value = 1", "", gpt2) == before  # nothing of the source is left
