import sys; sys.path.insert(0,'tests')
import torch
from dataclasses import replace
from fourfold.layout import Policy
from fourfold.grid import Shape
import test_recompute as T, fourfold as ff
from harness import Ranks
if __name__=="__main__":
    r=Ranks(4)
    names=[n for n,_ in ff.models.build(T.CONFIG, ff.Grid()).named_parameters()]
    for shape in (Shape(x=2,z=2),Shape(x=4),Shape(z=4)):
      for d in (0.0,0.3):
        config=replace(T.CONFIG,dropout=d)
        base=r.run(T.train,shape,Policy("sharded",recompute="none"),config)
        for kind in ("none","attention","block"):
            o=r.run(T.train,shape,Policy("sharded",recompute=kind),config)
            print(shape,d,kind,[[ (n,float((a-b).abs().max())) for n,a,b in zip(names,base[k]["gradients"],o[k]["gradients"]) if not torch.equal(a,b)][:3] for k in range(2)], flush=True)
    r.close()
