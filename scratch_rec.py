import sys; sys.path.insert(0,'tests')
import torch, fourfold as ff
from dataclasses import replace
from fourfold.layout import Policy
from fourfold.gradients import local_of
from fourfold.grid import Grid
import test_recompute as T
g=Grid()
def run(kind, d):
    config=replace(T.CONFIG,dropout=d)
    m=ff.models.build(config,g,policy=Policy("sharded",recompute=kind))
    tokens=torch.arange(64).view(4,16)%53
    a=m(tokens,tokens); b=m(tokens,tokens); (a+b).backward()
    return {n:local_of(p.grad).clone() for n,p in m.named_parameters()}, a.item()
for d in (0.0,0.3):
    n,l=run("none",d); n2,_=run("none",d)
    for kind in ("none","attention","block"):
        o,l2=run(kind,d); print(d,kind,l==l2,[(k, float((n[k]-o[k]).abs().max())) for k in n if not torch.equal(n[k],o[k])][:4])
