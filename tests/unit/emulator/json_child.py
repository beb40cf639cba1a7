"""A child for test_json_process: says back what it is told, and does what the word says."""

import json
import sys
import time

print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    word = json.loads(line)["word"]
    if word == "twice":
        print("1\n2", flush=True)
    elif word == "half":
        print('{"ha', end="", flush=True)
        print('lf": 1}', flush=True)
    elif word == "end":
        sys.exit(3)
    elif word == "deaf":
        time.sleep(60)
