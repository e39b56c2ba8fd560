#!/usr/bin/env bash
# Serve one model on this machine and on others, which are reached by ssh:
#
#   deploy/over-ssh.sh "10.0.0.2 10.0.0.3" MODEL --tp 3
#
# The others have weft installed, and the model at the same path. After the hosts come the
# arguments of `weft serve`. In the environment:
#
#   WEFT_NODE_TOKEN    what machines must know to join; else made
#   WEFT_NODE_ADDRESS  this machine's IP address for the others; else its first one
#   WEFT_NODE_PORT     7333 if not given
#   WEFT               how weft is called, here and there: weft, or a path to it
#   SSH                how ssh is called: ssh -o BatchMode=yes
set -euo pipefail

if [ $# -lt 2 ]; then
  sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
fi
read -r -a hosts <<< "$1"
shift

address=${WEFT_NODE_ADDRESS:-$(hostname -I | cut -d ' ' -f 1)}
export WEFT_NODE_ADDRESS=$address
export WEFT_NODE_PORT=${WEFT_NODE_PORT:-7333}
export WEFT_NODE_TOKEN=${WEFT_NODE_TOKEN:-$(head -c 24 /dev/urandom | base64)}

# Run there. The token goes by stdin: everybody on a machine can see arguments. When stdin ends,
# as it does when what is served here ends, however that ends, so does what runs there.
join="exec 3<&0; read -r WEFT_NODE_TOKEN; export WEFT_NODE_TOKEN
${WEFT:-weft} join $address:$WEFT_NODE_PORT & join=\$!
{ cat; kill \$join; } <&3 > /dev/null 2>&1 &
wait \$join; status=\$?
[ \$status = 143 ] || exit \$status"

stdins=()
for host in "${hosts[@]}"; do
  exec {stdin}> >(
    for other in "${stdins[@]}"; do exec {other}>&-; done
    ${SSH:-ssh -o BatchMode=yes} "$host" "$join" && exit
    echo "$0: $host does not take part any more (status $?)" >&2
    kill $$ 2> /dev/null  # which is weft serve
  )
  echo "$WEFT_NODE_TOKEN" >&"$stdin"
  stdins+=("$stdin")
done

exec ${WEFT:-weft} serve "$@" --nodes $((${#hosts[@]} + 1))
