#!/bin/sh
# ROOT is empty in a container.
answer=$(cat "$ROOT/app/answer.txt")
case "$answer" in
7) rewards='{"reward": 1, "form": 1, "digit": 1}' ;;
[0-9]) rewards='{"reward": 0.5, "form": 1, "digit": 0}' ;;
*) rewards='{"reward": 0, "form": 0, "digit": 0}' ;;
esac
echo "$rewards" > "$ROOT/logs/verifier/reward.json"
