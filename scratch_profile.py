import torch, sys, json, time, collections
import fourfold as ff
from fourfold.layout import Policy
torch.set_float32_matmul_precision("high")
grid=ff.Grid(device='cuda'); cfg=ff.models.config('gpt-1.4b')
pol=json.loads(sys.argv[1]) if len(sys.argv)>1 else {}
model=ff.models.build(cfg,grid,policy=Policy(compute=torch.bfloat16,**pol)); opt=ff.optim.AdamW(model,lr=1e-4)
t=torch.randint(cfg.vocab,(8,2049),device='cuda'); x,y=t[:,:-1].contiguous(),t[:,1:].contiguous()
def step():
    l=model(x,y); l.backward(); opt.clip_and_step(1.0); opt.zero_grad()
for _ in range(3): step()
torch.cuda.synchronize()
def phases():
    torch.cuda.synchronize(); t0=time.perf_counter(); l=model(x,y); t1=time.perf_counter(); l.backward(); t2=time.perf_counter(); n=opt.clip_and_step(1.0); opt.zero_grad(); t3=time.perf_counter(); torch.cuda.synchronize(); t4=time.perf_counter()
    return [round((b-a)*1e3,1) for a,b in ((t0,t1),(t1,t2),(t2,t3),(t3,t4),(t0,t4))]
for _ in range(3): print("issue fwd,bwd,opt,drain,total", phases())
for n in (1,3,10):
    torch.cuda.synchronize(); t0=time.perf_counter()
    for _ in range(n): step()
    torch.cuda.synchronize(); print(n,"steps", (time.perf_counter()-t0)/n*1e3)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA,torch.profiler.ProfilerActivity.CPU], record_shapes=True) as p:
    step(); torch.cuda.synchronize()
ks=collections.Counter(); n=collections.Counter(); iv=[]
for e in p.events():
    if str(e.device_type).endswith("CUDA") and "Command Buffer" not in e.name and "Optimizer" not in e.name:
        ks[e.name[:80]]+=e.self_device_time_total; n[e.name[:80]]+=1; iv.append((e.time_range.start,e.time_range.end,e.name))
print("total ms", sum(ks.values())/1e3, "span", (max(b for _,b,_ in iv)-min(a for a,_,_ in iv))/1e3)
iv.sort(); gaps=collections.Counter(); end=iv[0][1]; prev=iv[0][2]
for a,b,name in iv[1:]:
    if a>end: gaps[prev[:40]+' -> '+name[:40]]+=a-end
    if b>end: end=b; prev=name
print("idle", sum(gaps.values())/1e3)
for k,v in gaps.most_common(6): print(f"   {v/1e3:.2f} {k}")
big=[(e.time_range.end-e.time_range.start) for e in p.events() if 'Memcpy DtoD' in e.name]; print("memcpy us", sorted(big)[-12:])
for e in p.key_averages(group_by_input_shape=True):
    if e.key in ('aten::copy_','aten::clone','aten::contiguous','aten::cat') and e.device_time_total>300: print(e.key, e.input_shapes, e.count, round(e.device_time_total))
for k,v in ks.most_common(int(sys.argv[2]) if len(sys.argv)>2 else 14): print(f"{v/1e3:8.2f} ms {n[k]:5d}  {k}")
