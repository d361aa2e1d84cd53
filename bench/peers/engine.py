def run(o, log): return [], {}
