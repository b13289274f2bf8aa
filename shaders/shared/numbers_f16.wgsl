enable f16;
alias Numbers = vec4<f16>;
