#!/usr/bin/env bash
# English to Spanish, from the sentence pairs of Tatoeba: a small fast model that learns from a large one, and models of few pairs,
# with much Spanish and English text, or with other segmentations in each epoch.
#
#     bash scripts/recipes/pipeline_en_es/run.sh en_es.tsv runs/pipeline [MINUTES]
#
# MINUTES is the time of each training of part 2. Teachers have six times as long, and a training of a given number of updates at
# most four times [15]. Started again, the script goes on where it stopped.
# `python benchmarks/pipeline.py runs/pipeline` collects the results.
set -euo pipefail
pairs=$1 out=$2 minutes=${3:-15}
data=$out/data
here=$(dirname "$0")

# train NAME PAIRS MINUTES [OPTION ...]: train and score a model, unless it is finished. Ctrl-C ends the script.
train() {
    local name=$1 file=$2 time=$3 side=
    shift 3
    case $name in reverse) side=_reverse ;; esac
    [ -f "$out/$name.done" ] && return
    metaphrase train "$data/$file" --output_dir "$out/$name" --time_budget "${time}m" \
        --validation_file "$data/validation$side.tsv" --test_file "$data/test$side.tsv" --resume "$@"
    touch "$out/$name.done"
}

# network WIDTH ENCODER_LAYERS DECODER_LAYERS DROPOUT: the options of a network.
network() {
    local sizes="hidden_size $1 encoder_layers $2 decoder_layers $3 dropout $4" side
    for side in encoder decoder; do
        sizes+=" ${side}_ffn_dim $(($1 * 5 / 2)) ${side}_attention_heads 4"
    done
    echo "--preset metaphrase-tiny $(printf -- '--model.%s %s ' $sizes)"
}

# generate NAME: write the targets of the test set.
generate() {
    metaphrase generate "$out/$1" --input "$data/test.en" --output "$out/$1.es" --resume
}

# compare A B: test the difference of two systems.
compare() {
    for name in "$1" "$2"; do
        generate "$name"
    done
    metaphrase compare "$out/$1.es" "$out/$2.es" --source "$data/test.en" --target "$data/test.es" \
        --output "$out/$1-$2.json" "$out/$1-$2.html"
}

[ -f "$data/test.es" ] || python "$here/prepare.py" "$pairs" "$data"

# 1. A large teacher, and a small student. The student learns from the candidates of the teacher that are nearest to the references.
train teacher train.tsv $((minutes * 6)) --seed 1 $(network 256 3 3 0.2)
metaphrase distill "$out/teacher" --input "$data/train.tsv" --output "$data/distilled.tsv" --num_beams 8 --num_return_sequences 8 \
    --select bleu --resume
student="--max_steps 4000 $(network 128 4 2 0.1)"
train student distilled.tsv $((minutes * 4)) $student
compare teacher student
# The same small network, trained on the references.
train undistilled train.tsv $((minutes * 4)) $student
compare undistilled student
metaphrase shortlist "$out/student" "$data/distilled.tsv" --overwrite

# 2. A model of 10,000 pairs, and one that also learns from Spanish text, of which a reverse model writes the sources.
train small small.tsv $minutes
train reverse small_reverse.tsv $minutes
metaphrase backtranslate "$out/reverse" --input "$data/text.es" --output "$data/synthetic.tsv" --num_beams 4 --tag "<BT>" --resume
cat "$data/small.tsv" "$data/synthetic.tsv" > "$data/both.tsv"
train backtranslated both.tsv $minutes --additional_special_tokens "<BT>"
compare small backtranslated

# 3. A large teacher of these pairs, and a small student. The student learns from the teacher's targets of English text, which has
# no references.
train teacher_few both.tsv $((minutes * 6)) --max_steps 2000 --additional_special_tokens "<BT>" $(network 256 3 3 0.2)
cut -f 1 "$data/train.tsv" > "$data/text.en"
metaphrase distill "$out/teacher_few" --input "$data/text.en" --output "$data/distilled_few.tsv" --num_beams 4 --resume
train student_few distilled_few.tsv $((minutes * 4)) $student
compare teacher_few student_few
metaphrase shortlist "$out/student_few" "$data/distilled_few.tsv" --overwrite
# The same small network without the teacher: on the few pairs, and on these with the back-translated ones.
train undistilled_few small.tsv $((minutes * 4)) --max_steps 4000 $(network 128 4 2 0.3)
train undistilled_both both.tsv $((minutes * 4)) --additional_special_tokens "<BT>" $student
for name in undistilled_few undistilled_both; do
    compare "$name" student_few
done

# 4. The few pairs, with other segmentations in each epoch, which replace a part of dropout.
train plain small.tsv $((minutes * 4)) --max_steps 5000 $(network 128 2 2 0.3)
train sampled small.tsv $((minutes * 4)) --max_steps 5000 $(network 128 2 2 0.1) --subword_sampling 0.1
compare plain sampled
