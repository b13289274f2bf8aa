#!/usr/bin/env bash
# Makes the files of this folder with ffmpeg 5.1 (Debian 12): a gliding tone with beats over another one, and noise.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
ff() { ffmpeg -nostdin -hide_banner -loglevel error -y -bitexact "$@"; }
tone='0.4*sin(2*PI*(180+600*t)*t)*abs(sin(23*t))+0.2*sin(2*PI*(2600-2000*t)*t)+0.03*(random(0)-0.5)'
other='0.3*sin(2*PI*330*t)*cos(31*t)+0.02*(random(1)-0.5)'
sound() { printf 'aevalsrc=%s:s=%s:d=%s' "$1" "$2" "$3"; }
# NAME, what is said, rate, seconds, and how it is encoded; then as ffmpeg decodes it.
make() {
    local name=$1 said=$2 rate=$3 seconds=$4
    shift 4
    ff -f lavfi -i "$(sound "$said" "$rate" "$seconds")" "$@" -flags +bitexact "$name"
    local codec=()
    [[ $name != *.opus && $name != *.webm ]] || codec=(-c:a libopus)
    ff "${codec[@]}" -i "$name" -c:a pcm_s16le -flags +bitexact "$name.wav"
}
make stereo.flac "$tone|$other" 22050 0.2 -c:a flac -sample_fmt s16
make mono.mp3 "$tone" 22050 0.4 -c:a libmp3lame -b:a 32k
make stereo.mp3 "$tone|$other" 44100 0.1 -c:a libmp3lame -b:a 96k -joint_stereo 1
make mono.ogg "$tone" 22050 0.4 -c:a libvorbis -q:a 3
make mono.m4a "$tone" 22050 0.4 -c:a aac -b:a 48k -aac_pns 0
make mono.aac "$tone" 22050 0.2 -c:a aac -b:a 48k -aac_pns 0
make mono.opus "$tone" 48000 0.18 -c:a libopus -b:a 32k
make stereo.webm "$tone|$other" 48000 0.09 -c:a libopus -b:a 64k
ff -i mono.aac.wav -c:a alac alac.m4a
