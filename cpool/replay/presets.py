PRESETS={"agent":1}
DEFAULT_BLOCK_SIZE=16
def generate(*a): raise NotImplementedError
