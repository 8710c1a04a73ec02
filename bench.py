import torch, sys, time, os
sys.path.insert(0, os.path.join(os.path.dirname(__file__),"src"))
import posterity
from torch import nn
import torch.nn.functional as F
torch.backends.cuda.matmul.allow_tf32=True; torch.backends.cudnn.allow_tf32=True
def med(fn,n):
    for _ in range(10): fn()
    torch.cuda.synchronize(); ts=[]
    for r in range(5):
        t=time.perf_counter()
        for _ in range(n): fn()
        torch.cuda.synchronize(); ts.append((time.perf_counter()-t)/n*1e3)
    return sorted(ts)[2]
loss=lambda m,x,y: F.cross_entropy(m(x),y)
for w in (400,1200,2000):
    m=nn.Sequential(nn.Linear(784,w),nn.ReLU(),nn.Linear(w,w),nn.ReLU(),nn.Linear(w,10)).cuda()
    x=torch.rand(128,784,device="cuda"); y=torch.randint(0,10,(128,),device="cuda")
    opt=posterity.BGD(m,std_init=.02,lr=1e-4); 
    tl=med(lambda: opt.step(lambda: loss(m,x,y),batch_size=128),5)
    st=posterity.compile_step(m,loss,opt)
    t0=time.time(); st(x,y); st(x,y); torch.cuda.synchronize(); tc=time.time()-t0
    tg=med(lambda: st(x,y),200)
    g=next(iter(st._graphs.values())) if st._graphs else None
    tr=med(g.graph.replay,200) if g else None
    print("BGD",w,"loop",round(tl,3),"captured",round(tg,4),"replay only",tr,"first two calls s",round(tc,1),flush=True)
    if False:
        from torch.profiler import profile, ProfilerActivity
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            for _ in range(10): g.graph.replay()
            torch.cuda.synchronize()
        
m=nn.Sequential(nn.Linear(784,400),nn.ReLU(),nn.Linear(400,400),nn.ReLU(),nn.Linear(400,10)).cuda()
x=torch.rand(128,784,device="cuda"); y=torch.randint(0,10,(128,),device="cuda")
a=torch.optim.Adam(m.parameters(),fused=True)
def ad():
    a.zero_grad(); loss(m,x,y).backward(); a.step()
print("adam eager 400",med(ad,50))
