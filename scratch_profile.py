import sys, collections, torch, json
sys.path.insert(0,'benchmarks')
import vs_plain_torch as V, fourfold as ff, argparse
torch.set_float32_matmul_precision("high")
o=argparse.Namespace(compile=True,dtype='bf16',weights='fp32',policy=json.loads(sys.argv[1]) if len(sys.argv)>1 else {})
cfg=ff.models.config('gpt-1.4b'); dev=torch.device('cuda')
b=torch.randint(cfg.vocab,(8,2049),device=dev); t,y=b[:,:-1].contiguous(),b[:,1:].contiguous()
def cat(n):
    l=n.lower()
    if 'nvjet' in l or 'gemm' in l or 'cutlass' in l: return 'gemm'
    if 'cudnn' in l or 'flash' in l: return 'attention'
    if 'multi_tensor' in l: return 'optimizer+norm'
    return n[:75]
for make in (V.plain_torch, V.fourfold):
    side=make(cfg,t,y,dev,o)
    for _ in range(4): side.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        side.step(); torch.cuda.synchronize()
    ks=collections.Counter(); n=collections.Counter()
    for e in p.events():
        if str(e.device_type).endswith("CUDA") and not any(w in e.name for w in ("Command Buffer","Optimizer","## Call","Torch-Compiled","CompiledFunction","AUTOGRAD")):
            ks[cat(e.name)]+=e.self_device_time_total; n[cat(e.name)]+=1
    print(side.name, "kernels ms", sum(ks.values())/1e3)
    for k,v in ks.most_common(22): print(f"{v/1e3:8.2f} {n[k]:5d} {k}")
    del side; torch._dynamo.reset() if make is V.plain_torch else None; import gc; gc.collect(); torch.cuda.empty_cache()
