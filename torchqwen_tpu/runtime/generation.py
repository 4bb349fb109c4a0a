class Generation: pass
