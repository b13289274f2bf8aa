# Prints every failed test in logs of test runs, each with the end of its own output:
#
#     awk -f scripts/failed-tests.awk LOG..
#
# Reads the same logs as scripts/count-tests.awk. In logs of hundreds of tests the few relevant lines are in the
# middle, which truncated logs lose. Also names binaries ended by a signal, and steps that failed without a failed
# test, such as a lint: scripts/test ends its log with `step failed: NAME`.

BEGIN {
    if (!of_each) of_each = 60
    if (!of_all) of_all = 200
}

FNR == 1 { in_rust = in_python = 0; indent = -1; name = own = said = recent = ""; n_before = n }

{ recent = recent "\n" $0; if (++n_recent > 4 * of_each) { recent = last(recent, of_each); n_recent = of_each } }

# Rust's harness, and wasm-bindgen's. Passed tests come first, then failed ones, then the names of the latter.
/^(successes|failures|test result):/ { finish(); in_rust = /^failures:$/ }
in_rust && /^---- .* (stdout|output) ----$/ { finish(); name = $0; gsub(/^---- | (stdout|output) ----$/, "", name); next }
in_rust && name != "" { own = own "\n" $0 }
/^  process didn't exit successfully: .* \(signal: / { name = "ended by a signal"; own = recent; finish() }

# unittest: a line of `=`, then `FAIL: test_name (module)`.
/^=+$/ { finish(); in_python = 1; next }
in_python && name == "" && /^(FAIL|ERROR): / { name = $0; next }
in_python && /^Ran [0-9]+ tests? in / { finish(); in_python = 0 }
in_python && name != "" { own = own "\n" $0 }

# node:test. A test's output comes before its result, its diagnostics after it between `---` and `...`; so output
# between two results is shown with both.
/^ *(not )?ok [0-9]+ - / {
    finish_node()
    match($0, /^ */); indent = RLENGTH
    if (/^ *not ok / && !/ # (TODO|SKIP)/) { name = $0; sub(/^ *not ok [0-9]+ - /, "", name); own = said }
    said = ""
    next
}
# The plan ends a run; counts follow.
/^1\.\.[0-9]+$/ && !in_rust && !in_python { finish_node(); said = ""; next }
/^ *# Subtest: / { next }
!in_rust && !in_python {
    if (indent >= 0 && $0 == sprintf("%*s...", indent + 2, "")) indent = -1
    else if (indent < 0 && /^ *# /) said = said "\n" $0
    else if (indent >= 0 && name != "") own = own "\n" $0
}

/^step failed: / { finish(); if (n == n_before) { name = substr($0, 6); own = recent; finish() } }

END {
    finish()
    if (n == 0) exit
    # With many failures each has less room; all are named.
    room = int(of_all / n)
    if (room > of_each) room = of_each
    print "failed tests:"
    for (i = 1; i <= n; i++) {
        print "\n---- " names[i]
        if (room > 0) print last(outputs[i], room)
    }
}

function finish_node() { own = own said; finish(); indent = -1 }

function finish() {
    if (name != "") {
        names[++n] = name
        outputs[n] = own
    }
    name = own = ""
}

# The last `most` lines, without empty ones at either end.
function last(text, most,    lines, n_lines, first, i, out) {
    gsub(/^[\n ]*\n|[\n ]+$/, "", text)
    n_lines = split(text, lines, "\n")
    first = n_lines > most ? n_lines - most + 1 : 1
    for (i = first; i <= n_lines; i++) out = out (i > first ? "\n" : "") lines[i]
    return out
}
