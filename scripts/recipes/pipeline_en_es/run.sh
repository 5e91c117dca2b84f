#!/usr/bin/env bash
# English to Spanish, from the sentence pairs of Tatoeba: a fast model that learns from an ensemble, and a model of few pairs and
# much Spanish text.
#
#     bash scripts/recipes/pipeline_en_es/run.sh en_es.tsv runs/pipeline [MINUTES]
#
# MINUTES is the time to train each of the three teachers [60]. Other trainings take a half of it. Started again, the script
# goes on where it stopped.
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
    for name in "$1" "$2"; do
        [ -f "$out/$name.es" ] || generate "$name"
    done
    metaphrase compare "$out/$1.es" "$out/$2.es" --source "$data/test.en" --target "$data/test.es" \
        --output "$out/$1-$2.json" "$out/$1-$2.html"
}

[ -f "$data/test.es" ] || python "$here/prepare.py" "$pairs" "$data"

# 1. Three teachers, and two students of one shape: one learns from the pairs, one from the targets of all teachers together.
for seed in 1 2 3; do
    train teacher_$seed train.tsv "$minutes" --seed $seed
done
metaphrase distill "$out"/teacher_[123] --input "$data/train.tsv" --output "$data/distilled.tsv" --num_beams 4 --resume
train student_raw train.tsv "$half" --preset student-tiny
train student_distilled distilled.tsv "$half" --preset student-tiny
compare student_raw student_distilled
metaphrase generate "$out/teacher_1" --ensemble "$out/teacher_2" "$out/teacher_3" --input "$data/test.en" --output "$out/teachers.es" \
    --num_beams 4 --resume
compare teachers student_distilled
metaphrase shortlist "$out/student_distilled" "$data/train.tsv" --overwrite
metaphrase generate "$out/student_distilled" --input "$data/test.en" --output "$out/shortlist.es" --use_vmap --resume

# 2. A model of 10,000 pairs, and one that also learns from Spanish text, of which a reverse model writes the sources.
train small small.tsv "$half"
train reverse small_reverse.tsv "$half"
metaphrase backtranslate "$out/reverse" --input "$data/text.es" --output "$data/synthetic.tsv" --num_beams 4 --tag "<BT>" --resume
cat "$data/small.tsv" "$data/synthetic.tsv" > "$data/both.tsv"
train backtranslated both.tsv "$half" --additional_special_tokens "<BT>"
compare small backtranslated
