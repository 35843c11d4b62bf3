#!/usr/bin/env bash
# From a job's name to a released snapshot, a report and a method's card, by the commands alone.
#
#   JOB=axrl-v002-052915-math-moe-r3 OUTPUTS=/mnt/data/me/outputs METHOD=clip-rollout-log-ratio \
#   RATIONALE="one row's ratios are outliers" bash docs/workflow.sh
#
# Call it in the directory that agent-task/ and tmp/ are kept in. NODE, if it is set, is the rest of
# a command that replays on a GPU node: NODE='--ssh=ssh root@host'. Every command of it can be
# called again after an interrupt; so can the whole.
set -euo pipefail
: "${JOB:?the name of a job}" "${OUTPUTS:?where output directories lie}"
: "${METHOD:?the method to record}" "${RATIONALE:?why it works}"
node=(${NODE:+"$NODE"})
agree() { "$@" || test $? -eq 1; }  # 1 is a verdict, and what this is about

# the job's output directory, what the logs tell, and its snapshot with the largest ratio
spike-replay find "$JOB" --outputs "$OUTPUTS" --logs
found=$(spike-replay find "$JOB" --outputs "$OUTPUTS" --json | python3 -c '
import json, sys
snapshots = [s for s in json.load(sys.stdin)["snapshots"] if s["complete"]]
ratio = lambda s: s["ratio"] if isinstance(s["ratio"], float) else 0  # may be unknown
best = max(snapshots, key=ratio)
print(best["path"] or best["preserved"])')

# a copy that no rotation reaches; everything else looks at that
snapshot="$(dirname "$(dirname "$found")")/spike_snapshots-active/$(basename "$found")"
if [ "$found" != "$snapshot" ]; then spike-replay preserve "$found"; fi
spike-replay doctor "$snapshot"

# is the step reproduced, and what do its data say?
spike-replay replay "$snapshot" ${node[@]+"${node[@]}"}
spike-replay analyze "$snapshot"
spike-replay task note "$JOB" "the step is reproduced; next are the mitigations"

# what helps?
agree spike-replay replay "$snapshot" -m "$METHOD" ${node[@]+"${node[@]}"}
agree spike-replay sweep "$snapshot" "$METHOD" use-grpo-loss disable-routing-replay \
    --combine 2 --budget 4 ${node[@]+"${node[@]}"}

# what is proven is written up, then the job is done with
spike-replay record-method "$METHOD" --task "$JOB" --rationale "$RATIONALE"
spike-replay task finish "$JOB" "$METHOD takes the norm under the target"
spike-replay report "$JOB"
spike-replay release "$snapshot"
