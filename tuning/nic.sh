#!/bin/sh
# Brings a network card's queues to the lanes' cores: interrupts, RPS, XPS, and with ethtool the number of queues, ring
# sizes and interrupt moderation. Shows first, keeps the old values, brings them back.
#
#   nic.sh show  DEV CORES [--irq-cores CORES] [--queues N] [--ring N] [--usecs N]
#   nic.sh apply DEV CORES [the same]
#   nic.sh undo  DEV
#
# CORES are the lanes', such as 2-9. Queue by queue: interrupt and send queue i belong to core i. --irq-cores sends the
# interrupts to other cores (beside the lanes: lower latency, less throughput). --queues is as many as there are such
# cores, if the card has them; --ring and --usecs are left as they are unless given. Nothing survives a reboot.
#
# NIC_ROOT: a directory that holds proc and sys (a prepared tree, for trying it out). NIC_STATE: where old values are
# kept. ETHTOOL: the program.
set -eu

ROOT=${NIC_ROOT:-}
STATE=${NIC_STATE:-/var/lib/corelane/nic}
ETHTOOL=${ETHTOOL:-ethtool}

die() {
    echo "nic.sh: $*" >&2
    exit 2
}

# 0-3,6 → a line each
cores_of() {
    echo "$1" | tr ',' '\n' | while IFS=- read -r first last; do
        case "$first$last" in '' | *[!0-9]*) exit 1 ;; esac
        last=${last:-$first}
        [ "$first" -le "$last" ] && [ "$last" -lt 4096 ] || exit 1
        while [ "$first" -le "$last" ]; do
            echo "$first"
            first=$((first + 1))
        done
    done
}

# Core number n (from 0, around again) of a list with one a line.
nth() {
    n=$(($2 % $(echo "$1" | wc -l) + 1))
    echo "$1" | sed -n "${n}p"
}

# Cores, one a line → 00000001,0000000f
mask_of() {
    highest=$(echo "$1" | sort -n | tail -n 1)
    word=$((highest / 32))
    out=
    while [ "$word" -ge 0 ]; do
        bits=0
        for core in $1; do
            [ $((core / 32)) -ne "$word" ] || bits=$((bits | 1 << core % 32))
        done
        out=$out${out:+,}$(printf '%08x' "$bits")
        word=$((word - 1))
    done
    echo "$out"
}

# Whether two values of a file mean the same; masks are written with zeros and commas, or without.
same() {
    case $1 in
    *_cpus) [ "$(echo "$2" | tr -d ',' | sed 's/^0*//')" = "$(echo "$3" | tr -d ',' | sed 's/^0*//')" ] ;;
    *) [ "$2" = "$3" ] ;;
    esac
}

# Interrupts of the card's queues, in order, each with the number of its queue: in its name where sending and receiving
# have one each, else counted.
interrupts() {
    at=0
    for dir in "$CARD/device/msi_irqs" "$CARD/device/../msi_irqs"; do
        [ ! -d "$dir" ] || { ls "$dir" && return; }
    done | sort -n | while read -r irq; do
        row=$(sed -n "s/^ *$irq://p" "$ROOT/proc/interrupts")
        case $row in
        '' | *config* | *event* | *async* | *pages_eq* | *cmd_eq* | *mgmnt* | *mgmt* | *misc* | *inflate*) continue ;;
        *input.[0-9]* | *output.[0-9]* | *-rx-[0-9]* | *-tx-[0-9]*) queue=${row##*[!0-9]} ;;
        *) queue=$at ;;
        esac
        echo "$irq $queue"
        at=$((at + 1))
    done
}

queues() {
    for dir in "$CARD/queues/$1"-*; do
        [ ! -d "$dir" ] || basename "$dir"
    done | sort -t - -k 2 -n
}

# Changes to files of queues: path, tab, new value.
plan_files() {
    interrupts | while read -r irq queue; do
        printf '%s\t%s\n' "$ROOT/proc/irq/$irq/smp_affinity_list" "$(nth "$IRQ_CORES" "$queue")"
    done
    rps=0
    [ "$(queues rx | wc -l)" -ge "$(echo "$IRQ_CORES" | wc -l)" ] || rps=$(mask_of "$CORES")
    for queue in $(queues rx); do
        printf '%s\t%s\n' "$CARD/queues/$queue/rps_cpus" "$rps"
    done
    tx=$(queues tx | wc -l)
    [ "$tx" -gt 1 ] || return 0
    at=0
    for queue in $(queues tx); do
        own=$(nth "$CORES" $at)
        if [ "$tx" -lt "$(echo "$CORES" | wc -l)" ]; then
            own=$(echo "$CORES" | awk -v n="$tx" -v at="$at" '(NR - 1) % n == at')
        fi
        printf '%s\t%s\n' "$CARD/queues/$queue/xps_cpus" "$(mask_of "$own")"
        at=$((at + 1))
    done
}

# A value of ethtool's: section ("Pre-set" or "Current") and name, of the output on standard input.
value() {
    awk -v section="$1" -v name="$2:" '
        index($0, section) == 1 { inside = 1; next }
        /^(Pre-set|Current)/ { inside = 0 }
        inside && $0 ~ "^" name { print $NF }' | grep -x '[0-9]*' || true
}

# Changes by ethtool: option, name, old, new; tabs between.
plan_ethtool() {
    if ! command -v "$ETHTOOL" >/dev/null 2>&1; then
        echo "nic.sh: ethtool is not there: queues, rings and moderation stay as they are" >&2
        return
    fi
    if all=$("$ETHTOOL" -l "$DEV" 2>/dev/null); then
        most=$(echo "$all" | value Pre-set Combined)
        want=${QUEUES:-$(echo "$IRQ_CORES" | wc -l)}
        [ "$want" -le "${most:-0}" ] || want=$most
        changed -L combined "$(echo "$all" | value Current Combined)" "$want"
    fi
    if [ -n "$RING" ] && all=$("$ETHTOOL" -g "$DEV" 2>/dev/null); then
        for ring in RX TX; do
            most=$(echo "$all" | value Pre-set $ring)
            want=$RING
            [ "$want" -le "${most:-0}" ] || want=$most
            changed -G "$(echo $ring | tr RTX rtx)" "$(echo "$all" | value Current $ring)" "$want"
        done
    fi
    if [ -n "$USECS" ] && all=$("$ETHTOOL" -c "$DEV" 2>/dev/null); then
        adaptive=$(echo "$all" | sed -n 's/^Adaptive RX: *\(o[nf]*\).*/\1/p')
        changed -C adaptive-rx "$adaptive" off
        changed -C rx-usecs "$(echo "$all" | sed -n 's/^rx-usecs: *\([0-9]*\)$/\1/p')" "$USECS"
    fi
}

changed() {
    { [ -z "$3" ] || [ -z "$4" ] || [ "$3" = "$4" ]; } || printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4"
}

show() {
    plan_ethtool | while IFS="$TAB" read -r option name old new; do
        echo "$ETHTOOL $option $DEV $name: $old -> $new"
    done
    plan_files | while IFS="$TAB" read -r file new; do
        old=$(cat "$file" 2>/dev/null || true)
        same "$file" "$old" "$new" || echo "$file: ${old:-?} -> $new"
    done
}

# Keeps a file's value, unless it is kept already.
keep() {
    grep -q "^file$TAB$1$TAB" "$STATE/$DEV" || printf 'file\t%s\t%s\n' "$1" "$(cat "$1" 2>/dev/null || true)" >>"$STATE/$DEV"
}

apply() {
    [ ! -e "$STATE/$DEV" ] || die "$STATE/$DEV holds values from before: nic.sh undo $DEV first"
    mkdir -p "$STATE"
    : >"$STATE/$DEV"
    # Before queues come and go: their files do, too.
    plan_files | while IFS="$TAB" read -r file new; do
        keep "$file"
    done
    plan_ethtool | while IFS="$TAB" read -r option name old new; do
        echo "$ETHTOOL $option $DEV $name: $old -> $new"
        if "$ETHTOOL" "$option" "$DEV" "$name" "$new"; then
            printf 'ethtool\t%s\t%s\t%s\n' "$option" "$name" "$old" >>"$STATE/$DEV"
        fi
    done
    plan_files | while IFS="$TAB" read -r file new; do
        old=$(cat "$file" 2>/dev/null || true)
        ! same "$file" "$old" "$new" || continue
        keep "$file"
        write "$file" "$old" "$new"
    done
    if cat "$ROOT"/proc/[0-9]*/comm 2>/dev/null | grep -qx irqbalance; then
        echo "nic.sh: irqbalance runs and will move the interrupts again: systemctl disable --now irqbalance" >&2
    fi
}

write() {
    if { echo "$3" >"$1"; } 2>/dev/null; then
        echo "$1: $2 -> $3"
    else
        # Drivers may keep their interrupts' cores to themselves; queues may be gone.
        echo "nic.sh: $1 cannot be set, it stays ${2:-as it is}" >&2
    fi
}

undo() {
    [ -e "$STATE/$DEV" ] || die "$STATE/$DEV is not there: nothing was applied to $DEV"
    while IFS="$TAB" read -r kind option name old; do
        [ "$kind" != ethtool ] || "$ETHTOOL" "$option" "$DEV" "$name" "$old" || true
    done <"$STATE/$DEV"
    while IFS="$TAB" read -r kind file old; do
        [ "$kind" = file ] && [ -n "$old" ] && [ -e "$file" ] || continue
        now=$(cat "$file")
        same "$file" "$now" "$old" || write "$file" "$now" "$old"
    done <"$STATE/$DEV"
    rm "$STATE/$DEV"
}

TAB=$(printf '\t')
[ $# -ge 2 ] || die "nic.sh show|apply|undo DEV [CORES]; see the head of this file"
ACTION=$1 DEV=$2
shift 2
CARD=$ROOT/sys/class/net/$DEV
[ -d "$CARD/device" ] || die "$DEV: no such card"
case $ACTION in
undo)
    undo
    exit 0
    ;;
show | apply) ;;
*) die "$ACTION: show, apply or undo" ;;
esac
[ $# -ge 1 ] || die "which cores? such as: nic.sh $ACTION $DEV 2-9"
CORES=$(cores_of "$1") || die "$1: a list of cores looks like 2-9,12"
IRQ_CORES=$CORES QUEUES='' RING='' USECS=''
shift
while [ $# -ge 2 ]; do
    case $1 in
    --irq-cores) IRQ_CORES=$(cores_of "$2") || die "$2: a list of cores looks like 2-9,12" ;;
    --queues) QUEUES=$2 ;;
    --ring) RING=$2 ;;
    --usecs) USECS=$2 ;;
    *) die "$1: no such option" ;;
    esac
    shift 2
done
[ $# -eq 0 ] || die "$1: no such option, or one without its value"
case $QUEUES$RING$USECS in *[!0-9]*) die "--queues, --ring and --usecs take numbers" ;; esac
for core in $CORES $IRQ_CORES; do
    [ -d "$ROOT/sys/devices/system/cpu/cpu$core" ] || die "core $core is not there"
done
"$ACTION"
