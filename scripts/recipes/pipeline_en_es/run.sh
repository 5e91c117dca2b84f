#!/usr/bin/env bash
# English to Spanish, from the sentence pairs of Tatoeba: a fast model that learns from an ensemble, and models of few pairs, with
# much Spanish text or with other segmentations in each epoch.
#
#     bash scripts/recipes/pipeline_en_es/run.sh en_es.tsv runs/pipeline [MINUTES]
#
# MINUTES is the time of each training, and two trainings of many updates have half as much again [15]. Started again, the script
# goes on where it stopped.
# `python benchmarks/pipeline.py runs/pipeline` collects the results.
set -euo pipefail
pairs=$1 out=$2 minutes=${3:-15}
data=$out/data
here=$(dirname "$0")

# train NAME PAIRS [OPTION ...]: train and score a model, unless it is finished.
train() {
    local name=$1 file=$2 side=
    shift 2
    case $name in reverse) side=_reverse ;; esac
    [ -f "$out/$name/metrics.json" ] || metaphrase train "$data/$file" --output_dir "$out/$name" --time_budget "${minutes}m" \
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

# 1. Three teachers, and a student with the shape of one. It learns from the targets of all teachers together.
for seed in 1 2 3; do
    train teacher_$seed train.tsv --seed $seed
done
metaphrase distill "$out"/teacher_[123] --input "$data/train.tsv" --output "$data/distilled.tsv" --num_beams 4 --resume
train student_distilled distilled.tsv
# A teacher is the same network, trained on the pairs.
compare teacher_1 student_distilled
metaphrase generate "$out/teacher_1" --ensemble "$out/teacher_2" "$out/teacher_3" --input "$data/test.en" --output "$out/teachers.es" \
    --num_beams 4 --resume
compare teachers student_distilled
metaphrase shortlist "$out/student_distilled" "$data/distilled.tsv" --overwrite
metaphrase generate "$out/student_distilled" --input "$data/test.en" --output "$out/shortlist.es" --use_vmap --resume

# 2. A model of 10,000 pairs, and one that also learns from Spanish text, of which a reverse model writes the sources.
train small small.tsv
train reverse small_reverse.tsv
metaphrase backtranslate "$out/reverse" --input "$data/text.es" --output "$data/synthetic.tsv" --num_beams 4 --tag "<BT>" --resume
cat "$data/small.tsv" "$data/synthetic.tsv" > "$data/both.tsv"
train backtranslated both.tsv --additional_special_tokens "<BT>"
compare small backtranslated

# 3. The few pairs, with other segmentations in each epoch. This needs many updates, which a small network makes in the time.
network="--preset metaphrase-tiny --model.hidden_size 128 --model.dropout 0.3 --max_steps 5000"
for side in encoder decoder; do
    network+=" --model.${side}_layers 2 --model.${side}_ffn_dim 320 --model.${side}_attention_heads 4"
done
minutes=$((minutes * 3 / 2))
train plain small.tsv $network
train sampled small.tsv $network --subword_sampling 0.1
compare plain sampled
