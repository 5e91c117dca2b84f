#!/usr/bin/env bash
# English to Spanish, from the sentence pairs of Tatoeba: a small model that learns from a large one, and a model of few pairs
# and much Spanish text.
#
#     bash scripts/recipes/pipeline_en_es/run.sh en_es.tsv runs/pipeline [MINUTES]
#
# MINUTES is the time of the teacher's training. The others take a half of it. Started again, it goes on where it stopped.
set -euo pipefail
pairs=$1 out=$2 minutes=${3:-60}
data=$out/data half=$((minutes / 2))
here=$(dirname "$0")

# train NAME PAIRS MINUTES [OPTION ...]: train and score a model, unless it is finished.
train() {
    local name=$1 file=$2 time=$3 side=
    shift 3
    case $name in reverse) side=_reverse ;; esac
    [ -f "$out/$name/metrics.json" ] || metaphrase train "$data/$file" --output_dir "$out/$name" --time_budget "${time}m" \
        --validation_file "$data/validation$side.tsv" --test_file "$data/test$side.tsv" --resume "$@"
}

# generate NAME: write the targets of the test set.
generate() {
    metaphrase generate "$out/$1" --input "$data/test.en" --output "$out/$1.es" --resume
}

# compare A B: test the difference of two systems.
compare() {
    generate "$1"
    generate "$2"
    metaphrase compare "$out/$1.es" "$out/$2.es" --source "$data/test.en" --target "$data/test.es" \
        --output "$out/$1-$2.json" "$out/$1-$2.html"
}

[ -f "$data/test.es" ] || python "$here/prepare.py" "$pairs" "$data"

# 1. A teacher, and two students of one shape: one learns from the pairs, one from the teacher's targets.
train teacher train.tsv "$minutes" --preset metaphrase-small
metaphrase distill "$out/teacher" --input "$data/train.tsv" --output "$data/distilled.tsv" --num_beams 4 --resume
train student_raw train.tsv "$half" --preset student-tiny
train student_distilled distilled.tsv "$half" --preset student-tiny
compare student_raw student_distilled
compare teacher student_distilled

# 2. A model of 10,000 pairs, and one that also learns from Spanish text, of which a reverse model writes the sources.
train small small.tsv "$half"
train reverse small_reverse.tsv "$half"
metaphrase backtranslate "$out/reverse" --input "$data/text.es" --output "$data/synthetic.tsv" --num_beams 4 --tag "<BT>" --resume
cat "$data/small.tsv" "$data/synthetic.tsv" > "$data/both.tsv"
train backtranslated both.tsv "$half" --additional_special_tokens "<BT>"
compare small backtranslated
