"""Has SkyPilot read task.yaml, choose nodes for it, and plan its launch, as `sky launch --dryrun`.

Run by the Python that has SkyPilot. `sky` itself asks a server that accepts no cloud without a
login, so its own function is called here.
"""

import json

import sky  # pyright: ignore
from sky import check, execution, global_user_state  # pyright: ignore
from sky.clouds.cloud import CloudCapability  # pyright: ignore

# One cloud counts as usable without an account, so that nothing is asked over the network.
allowed = check._get_workspace_allowed_clouds("default")
global_user_state.set_allowed_clouds(allowed, "default")
global_user_state.set_enabled_clouds(["lambda"], CloudCapability.COMPUTE, "default")
with sky.Dag() as dag:
    dag.add(sky.Task.from_yaml("task.yaml"))
task = sky.Optimizer.optimize(dag, quiet=True).tasks[0]
planned = sky.Task.from_yaml("task.yaml")
_, handle = execution.launch(planned, "exported", dryrun=True, stream_logs=False)
assert handle is None, "nothing was made"
print(json.dumps({"nodes": task.num_nodes, "instance": task.best_resources.instance_type}))
